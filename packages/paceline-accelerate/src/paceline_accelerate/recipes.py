"""accelerate's recipes for float8, which scripts pass in `Accelerator(kwargs_handlers=...)`.

Paceline multiplies in float8 by torchao, whose recipe becomes options of the strategy `fp8`. The others raise an error where
their library is missing, and are refused by the accelerator. They fill and check their fields nevertheless, for tests of
scripts that replace the question for the library.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

from paceline.base import env as environment
from paceline.base.parts import how_to_install
from paceline_accelerate.arguments import KwargsHandler
from paceline_accelerate.available import is_torchao_available, is_transformer_engine_available
from paceline_accelerate.errors import CompatImportError, CompatValueError

NATIVE_FLOAT8 = (
    "leave it out: mixed_precision='fp8' uses torchao, with `AORecipeKwargs`, or natively "
    "`paceline.Accelerator(mixed_precision='fp8', options={'fp8': {'recipe': 'rowwise_with_gw_hp'}})`"
)
_LEVELS = ("O1", "O2")
_FORMATS = ("HYBRID", "E4M3", "E5M2")
_ALGORITHMS = ("max", "most_recent")
_BACKENDS = ("MSAMP", "TE")


def _require(recipe: object, library: str, is_available: bool, fix: str) -> None:
    # accelerate raises an ImportError where the library of the recipe is not installed.
    if not is_available:
        raise CompatImportError(
            "compat-name",
            f"{library} is not available, and {type(recipe).__name__} needs it.",
            why="Paceline multiplies in float8 by torchao alone",
            fix=fix,
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


def _flag(name: str) -> bool:
    return environment.parse_bool(_variable(name, "no"))


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Options of torchao's float8."""

    config: Any = None
    module_filter_func: Any = None
    pad_inner_dim: Any = None
    enable_fsdp_float8_all_gather: Any = None

    def __post_init__(self) -> None:
        _require(self, "TorchAO", is_torchao_available(), f"run `{how_to_install('fp8')}`")

    def options(self) -> dict[str, Any]:
        """Returns the options of the strategy `fp8`.

        `pad_inner_dim` and `enable_fsdp_float8_all_gather` change no numbers of layers whose sizes fit, and have no effect.

        Raises:
            CompatValueError: `compat-argument`, for a config that is none of the recipes.
        """
        options: dict[str, Any] = {}
        if self.config is not None:
            options["recipe"] = _recipe_of(self.config)
        if self.module_filter_func is not None:
            options["layers"] = self.module_filter_func
        return options


def _recipe_of(config: Any) -> str:
    """Returns the name of torchao's recipe that makes a config; how weights travel and are filled up does not count."""
    from torchao.float8 import Float8LinearConfig, Float8LinearRecipeName

    given = replace(config, enable_fsdp_float8_all_gather=False, pad_inner_dim=False)
    for recipe in Float8LinearRecipeName:
        if Float8LinearConfig.from_recipe_name(recipe) == given:
            name: str = recipe.value
            return name
    names = ", ".join(recipe.value for recipe in Float8LinearRecipeName)
    raise CompatValueError(
        "compat-argument",
        "AORecipeKwargs: this config is none of torchao's recipes.",
        why=f"it is {config!r}; recipes: {names}",
        fix="write config=Float8LinearConfig.from_recipe_name('rowwise_with_gw_hp')",
    )


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
        _require(self, "TransformerEngine", is_transformer_engine_available(), NATIVE_FLOAT8)
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
