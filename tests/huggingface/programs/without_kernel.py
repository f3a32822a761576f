"""Runs a program under the real DeepSpeed without its shared-memory kernel, which would be compiled and changes no number."""

import runpy
import sys
from importlib import import_module

# The attribute `torch` of `deepspeed.comm` is PyTorch itself, and so would `import deepspeed.comm.torch as ...` be.
import_module("deepspeed.comm.torch").build_shm_op = lambda: None
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
