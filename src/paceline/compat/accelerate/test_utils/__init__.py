"""`accelerate.test_utils`: what tests of libraries that build on accelerate take from it.

The folder lies where accelerate's own does, because `path_in_accelerate_package("test_utils", "scripts", ...)` gives paths
of scripts to `accelerate launch` and to torchrun.
"""
