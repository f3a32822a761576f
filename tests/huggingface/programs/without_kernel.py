"""Runs a program under the real DeepSpeed without its shared-memory kernel, which would be compiled and changes no number."""

import runpy
import sys

import deepspeed.comm.torch  # noqa: F401

# Not `import ... as`: that follows attributes, and the attribute `torch` of `deepspeed.comm` is torch itself.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
