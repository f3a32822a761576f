"""`accelerate.utils.imports`: whether a library or a device is there. `is_<name>_available` asks for the package <name>."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import cache

import torch

from paceline.base import env
from paceline.base.devices import ACCELERATORS

# Where the package is called otherwise.
_PACKAGES = {
    "fp8": "torchao",
    "bnb": "bitsandbytes",
    "4bit_bnb": "bitsandbytes",
    "8bit_bnb": "bitsandbytes",
    "bitsandbytes_multi_backend": "bitsandbytes",
    "torchdata_stateful_dataloader": "torchdata",
    "lomo": "lomo_optim",
}
# Where one of several distributions is enough: the package and the distribution of each.
_DISTRIBUTIONS = {
    "pynvml": (("pynvml", None), ("pynvml", "nvidia-ml-py")),
    "tensorboard": (("tensorboard", None), ("tensorboardX", None)),
    "mlflow": (("mlflow", None), ("mlflow", "mlflow-skinny")),
}
# What is never so here: devices that this library does not drive, float8 by other libraries than torchao, engines.
_NEVER = ("transformer_engine", "transformer_engine_mxfp8", "msamp", "torch_xla", "megatron_lm",
          "sagemaker", "habana_gaudi1")  # fmt: skip
_DEVICES = (*ACCELERATORS, "neuron")


@cache
def has_package(package: str, distribution: str | None = None) -> bool:
    """Whether a package is installed.

    Args:
        package: its name in `import`.
        distribution: its name in `pip install`; None if that is the same.
    """
    if importlib.util.find_spec(package) is None:
        return False
    # A folder in the working directory can be imported too: trackers write into `wandb` and `mlflow`.
    try:
        importlib.metadata.distribution(distribution or package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# accelerate's name, which libraries on top of it import.
_is_package_available = has_package


def _answer(what: str) -> bool:
    """Whether something can be used."""
    if what in _NEVER:
        return False
    if what in _DEVICES:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
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
    if what in _DISTRIBUTIONS:
        return any(has_package(package, distribution) for package, distribution in _DISTRIBUTIONS[what])
    return has_package(_PACKAGES.get(what, what))


@cache
def _asker(what: str) -> Callable[..., bool]:
    """Returns the function that asks for something: one for each, as tests of scripts compare and replace it."""

    def available(*args: object, min_version: object = None, **kwargs: object) -> bool:
        # About a device, the argument asks for more than the answer of torch, which counts here.
        [least] = args[:1] or [min_version]
        if what in _DEVICES or not isinstance(least, str):
            return _answer(what)
        from paceline_accelerate.surroundings import compare_versions  # imports torch's checkpoints

        return _answer(what) and compare_versions(_PACKAGES.get(what, what), ">=", least)

    asks_for_device = what in _DEVICES and what not in ("cuda", "mps")
    if asks_for_device or what == "torch_xla":
        # Those of accelerate remember their answers, and scripts call their `cache_clear`.
        available = cache(available)
    available.__name__ = f"is_{what}_available"
    available.__doc__ = f"Whether {what} can be used."
    return available


def __getattr__(name: str) -> Callable[..., bool]:
    if not (name.startswith("is_") and name.endswith("_available")):
        raise AttributeError(name)
    return _asker(name.removeprefix("is_").removesuffix("_available"))
