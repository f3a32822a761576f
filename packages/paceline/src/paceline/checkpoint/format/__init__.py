"""What a checkpoint's folder holds: ours, and those of other libraries through one registry.

A format is one file here with `CHECKPOINT_FORMAT = Class()`, a file of a library's package in `compat`, or an entry point
`paceline.checkpoint_formats` of another distribution.
"""
