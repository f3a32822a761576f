"""`accelerate.test_utils`: the tools that tests of libraries on top of accelerate import from it.

The folders have accelerate's names, because `path_in_accelerate_package("test_utils", "scripts", ...)` returns paths of
scripts, which tests hand to `accelerate launch` and to torchrun.
"""
