"""`accelerate.utils.imports`: whether a library or a device is there. `is_<name>_available` asks for the package <name>."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

import torch

from paceline.base import env

# Where the package is called otherwise.
_PACKAGES = {"bnb": "bitsandbytes", "torchdata_stateful_dataloader": "torchdata", "lomo": "lomo_optim"}
# What is never so here: devices that this library does not drive, 8-bit training, engines.
_NEVER = ("fp8", "transformer_engine", "transformer_engine_mxfp8", "msamp", "torch_xla", "megatron_lm",
          "sagemaker", "4bit_bnb", "8bit_bnb", "bitsandbytes_multi_backend", "habana_gaudi1")  # fmt: skip
_DEVICES = ("cuda", "xpu", "npu", "mps", "mlu", "musa", "sdaa", "hpu", "neuron")


@cache
def has_package(package: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(package) is not None


def _asker(what: str) -> Callable[..., bool]:
    def available(*args: object, **kwargs: object) -> bool:
        if what in _NEVER:
            return False
        if what in _DEVICES:
            accelerator = torch.accelerator.current_accelerator()
            return accelerator is not None and accelerator.type == what
        if what == "bf16":
            return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()
        if what in ("fp16", "pippy", "weights_only"):
            return True
        if what == "torch_distributed":
            return torch.distributed.is_available()
        if what == "rich":
            # accelerate changes how tracebacks look only where it is asked to.
            return has_package("rich") and env.parse_bool(env.snapshot().get("ACCELERATE_ENABLE_RICH", "0"))
        if what == "rocm":
            return torch.version.hip is not None
        if what == "xccl":
            return torch.distributed.is_xccl_available()
        return has_package(_PACKAGES.get(what, what))

    available.__name__ = f"is_{what}_available"
    available.__doc__ = f"Whether {what} can be used."
    return available


def __getattr__(name: str) -> Callable[..., bool]:
    if not (name.startswith("is_") and name.endswith("_available")):
        raise AttributeError(name)
    return _asker(name.removeprefix("is_").removesuffix("_available"))
