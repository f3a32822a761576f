"""accelerate's recipes for 8-bit arithmetic, which scripts pass in `Accelerator(kwargs_handlers=...)`.

Paceline does not train in 8 bits and finds none of the libraries that do, so most of the classes raise an error when they are
made. They fill and check their fields nevertheless, for tests of scripts that replace the question for the library.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from paceline.base import env as environment
from paceline_accelerate.arguments import KwargsHandler
from paceline_accelerate.available import is_torchao_available, is_transformer_engine_available
from paceline_accelerate.errors import CompatImportError, CompatValueError

_LEVELS = ("O1", "O2")
_FORMATS = ("HYBRID", "E4M3", "E5M2")
_ALGORITHMS = ("max", "most_recent")
_BACKENDS = ("MSAMP", "TE")


def _require(recipe: object, library: str, is_available: bool) -> None:
    # accelerate raises an ImportError where the library of the recipe is not installed.
    if not is_available:
        raise CompatImportError(
            "compat-name",
            f"{library} is not available, and {type(recipe).__name__} is not carried by Paceline.",
            why="8-bit training is not built yet",
            fix="use mixed_precision='bf16'",
        )


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise CompatValueError(
            "compat-argument",
            f"`{name}` must be one of {' or '.join(known)}.",
            why=f"it is {value!r}",
            fix=f"write {name}={known[0]!r}",
        )


def _variable(name: str, default: str) -> str:
    return environment.snapshot().get(f"ACCELERATE_FP8_{name.upper()}", default)


def _flag(name: str, default: bool = False) -> bool:
    return environment.parse_bool(_variable(name, str(default)))


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Options of torchao's float8."""

    config: Any = None
    module_filter_func: Any = None
    pad_inner_dim: Any = None
    enable_fsdp_float8_all_gather: Any = None

    def __post_init__(self) -> None:
        _require(self, "TorchAO", is_torchao_available())


@dataclass
class TERecipeKwargs(KwargsHandler):
    """Options of TransformerEngine's float8; variables fill the fields that are None."""

    use_autocast_during_eval: Any = None
    margin: Any = None
    interval: Any = None
    fp8_format: Any = None
    amax_history_len: Any = None
    amax_compute_algo: Any = None
    override_linear_precision: Any = None
    use_mxfp8_block_scaling: Any = None

    def __post_init__(self) -> None:
        _require(self, "TransformerEngine", is_transformer_engine_available())
        for name in ("use_autocast_during_eval", "use_mxfp8_block_scaling"):
            if getattr(self, name) is None:
                setattr(self, name, _flag(name))
        for name, default in (("margin", "0"), ("interval", "1"), ("amax_history_len", "1024")):
            if getattr(self, name) is None:
                setattr(self, name, int(_variable(name, default)))
        self.fp8_format = (self.fp8_format or _variable("format", "HYBRID")).upper()
        _check("fp8_format", self.fp8_format, _FORMATS)
        self.amax_compute_algo = (self.amax_compute_algo or _variable("amax_compute_algo", "most_recent")).lower()
        _check("amax_compute_algo", self.amax_compute_algo, _ALGORITHMS)
        if self.override_linear_precision is None:
            names = ("override_fprop", "override_dgrad", "override_wgrad")
            self.override_linear_precision = tuple(_flag(name) for name in names)


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Options of MS-AMP."""

    opt_level: Any = None

    def __post_init__(self) -> None:
        if self.opt_level is None:
            self.opt_level = _variable("opt_level", "O2")
        _check("opt_level", self.opt_level, _LEVELS)


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The older class for the options of either library."""

    backend: Any = None

    def __post_init__(self) -> None:
        message = "FP8RecipeKwargs is deprecated: use TERecipeKwargs or MSAMPRecipeKwargs."
        warnings.warn(message, FutureWarning, stacklevel=3)
        self.backend = (self.backend or _variable("backend", "TE")).upper()
        _check("backend", self.backend, _BACKENDS)
        super().__post_init__()
