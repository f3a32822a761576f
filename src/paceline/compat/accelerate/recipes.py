"""accelerate's recipes for 8-bit arithmetic, which scripts pass in `Accelerator(kwargs_handlers=...)`.

Paceline does not train in 8 bits, so most of the classes raise an error when they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.base import env as environment
from paceline.compat.accelerate.arguments import KwargsHandler
from paceline.compat.accelerate.errors import CompatImportError

_LEVELS = ("O1", "O2")


def _refuse(recipe: object) -> NoReturn:
    # accelerate raises an ImportError where the library of the recipe is not installed.
    raise CompatImportError(
        "compat-name",
        f"{type(recipe).__name__} is not carried by Paceline.",
        why="8-bit training is not built yet",
        fix="use mixed_precision='bf16'",
    )


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Options of torchao's float8."""

    config: Any = None
    module_filter_func: Any = None
    pad_inner_dim: Any = None
    enable_fsdp_float8_all_gather: Any = None

    def __post_init__(self) -> None:
        _refuse(self)


@dataclass
class TERecipeKwargs(KwargsHandler):
    """Options of TransformerEngine's float8."""

    use_autocast_during_eval: Any = None
    margin: Any = None
    interval: Any = None
    fp8_format: Any = None
    amax_history_len: Any = None
    amax_compute_algo: Any = None
    override_linear_precision: Any = None
    use_mxfp8_block_scaling: Any = None

    def __post_init__(self) -> None:
        _refuse(self)


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Options of MS-AMP."""

    opt_level: Any = None

    def __post_init__(self) -> None:
        if self.opt_level is None:
            self.opt_level = environment.snapshot().get("ACCELERATE_FP8_OPT_LEVEL", "O2")
        if self.opt_level not in _LEVELS:
            raise ValueError(f"`opt_level` must be one of {' or '.join(_LEVELS)}")


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The older class for the options of either library."""

    backend: Any = None
