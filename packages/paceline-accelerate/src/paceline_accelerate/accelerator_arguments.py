"""The arguments of accelerate's `Accelerator`: checks them, and translates them into arguments of Paceline's own.

Only `accelerator` calls this module. A check collects all problems before it raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.base import env as environment
from paceline.base.errors import Problem
from paceline.base.log import warn_once
from paceline.config.given import Given
from paceline.config.overrides import Overrides
from paceline.plan.semantics import Semantics
from paceline.run.starting import RunArguments
from paceline.world.world import World
from paceline_accelerate.arguments import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from paceline_accelerate.deepspeed_plugin import DeepSpeedPlugin
from paceline_accelerate.errors import CompatTypeError, CompatValueError, UnknownHandler
from paceline_accelerate.fsdp import said_by
from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin
from paceline_accelerate.kinds import DynamoBackend, PrecisionType, text_of
from paceline_accelerate.parallelism_config import ParallelismConfig
from paceline_accelerate.plugins import TorchDynamoPlugin, TorchTensorParallelPlugin
from paceline_accelerate.recipes import (
    NATIVE_FLOAT8,
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from paceline_accelerate.semantics import ACCELERATE
from paceline_accelerate.state import AcceleratorState, deepspeed_plugins_of, is_initialized, wanted_device

UNSAID: Any = object()  # the default of an argument for which None or False would be a choice of the script
# Attribute of the accelerator -> class of the handler that it shows.
HANDLERS = {
    "ddp_handler": DistributedDataParallelKwargs,
    "scaler_handler": GradScalerKwargs,
    "init_handler": InitProcessGroupKwargs,
    "autocast_handler": AutocastKwargs,
    "profile_handler": ProfileKwargs,
    "ao_recipe_handler": AORecipeKwargs,
}
# Plugin that cannot be used -> what to do instead.
_WINDOW_VARIABLE = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_FIXES = {
    "deepspeed_plugin": "give one `DeepSpeedPlugin`, or several by name: `deepspeed_plugins={'student': ..., 'teacher': ...}`",
    "megatron_lm_plugin": "native: `paceline.Accelerator(plan={'tp': 2, 'pp': 2})`",
}


def agreed_precision(wanted: str | None) -> str | None:
    """Returns the precision of this accelerator, which is that of an earlier accelerator if this process made one.

    Raises:
        CompatValueError: `compat-argument`, for another precision than the earlier one, or an unknown word.
    """
    word = None if wanted is None else text_of(wanted)
    if is_initialized():
        state = AcceleratorState()
        state._check_initialized(word)
        return state.mixed_precision
    if word is not None and word not in PrecisionType:
        raise CompatValueError(
            "compat-argument",
            f"Unknown mixed_precision mode: {word}.",
            why="it comes from Accelerator(mixed_precision=...)",
            fix=f"choose between {PrecisionType.list()}",
        )
    return word


def is_forced_to_cpu() -> bool:
    """Whether ACCELERATE_TORCH_DEVICE names the CPU."""
    wanted = wanted_device()
    return wanted is not None and torch.device(wanted).type == "cpu"


def problem_of_wanted_device() -> CompatValueError | None:
    """Returns the error for an ACCELERATE_TORCH_DEVICE that this process would not choose itself; None if there is none.

    `prepare` raises it, and not the accelerator, because under accelerate the states can show any device.
    """
    wanted = wanted_device()
    if wanted is None:
        return None
    device = torch.device(wanted)
    if device.type == "cpu":
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    local_rank = World.detect().local_rank
    # A variable that is the same for all processes names the first device, and each process takes its own.
    is_own_index = device.index in (None, 0, local_rank)
    if accelerator is not None and accelerator.type == device.type and is_own_index:
        return None
    return CompatValueError(
        "compat-argument",
        f"a model cannot be trained on {wanted!r} here.",
        why=f"ACCELERATE_TORCH_DEVICE={wanted}; this process would take {accelerator or 'cpu'}:{local_rank}",
        fix="unset ACCELERATE_TORCH_DEVICE; choose devices by CUDA_VISIBLE_DEVICES",
    )


@dataclass
class AcceleratorArguments:
    """The arguments of accelerate's `Accelerator`, and what they ask of Paceline's own.

    Args:
        as the accelerator documents them.

    Attributes:
        plugins: DeepSpeed's plugins by name.
        handlers: the handler of each class, or None, by the name of the accelerator's attribute.
        loading: the options of loaders.
        project: the folders.
        window: the accumulation window.
        dynamo: the options of `torch.compile`, whichever of the two arguments gave them.

    Raises:
        CompatValueError, CompatTypeError, UnknownHandler: `compat-argument`.
    """

    device_placement: bool
    mixed_precision: str | None
    gradient_accumulation_steps: int
    cpu: bool
    dataloader_config: DataLoaderConfiguration | None
    deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None
    fsdp_plugin: FullyShardedDataParallelPlugin | None
    torch_tp_plugin: TorchTensorParallelPlugin | None
    megatron_lm_plugin: object
    rng_types: Sequence[str] | None
    log_with: Any
    project_dir: str | Path | None
    project_config: ProjectConfiguration | None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None
    step_scheduler_with_optimizer: bool
    kwargs_handlers: Sequence[KwargsHandler] | None
    dynamo_backend: str | None
    dynamo_plugin: TorchDynamoPlugin | None
    deepspeed_plugins: Mapping[str, DeepSpeedPlugin] | None
    parallelism_config: ParallelismConfig | None
    split_batches: bool = UNSAID

    def __post_init__(self) -> None:
        self.plugins = deepspeed_plugins_of(self.deepspeed_plugin, self.deepspeed_plugins)
        self._check_arguments()
        self._check_plugins()
        self.handlers: dict[str, Any] = dict.fromkeys(HANDLERS)
        for name, handler_class in HANDLERS.items():
            for handler in self.kwargs_handlers or ():
                if isinstance(handler, handler_class):
                    self.handlers[name] = handler
        self.project = self.project_config or ProjectConfiguration()
        if self.project.project_dir is None:
            self.project.set_directories(self.project_dir)
        self.loading = self.dataloader_config or DataLoaderConfiguration()
        if self.split_batches is not UNSAID and bool(self.split_batches) != self.loading.split_batches:
            warn_once(
                "compat",
                f"Accelerator(split_batches={self.split_batches}) has no effect, as in accelerate since 1.0. Pass "
                f"`dataloader_config=DataLoaderConfiguration(split_batches={self.split_batches})` if you want it.",
            )
        self.window = self.gradient_accumulation_plugin or GradientAccumulationPlugin(num_steps=self._window_steps())
        self.dynamo = self.dynamo_plugin
        if self.dynamo is None:  # a plugin that is switched off is false
            self.dynamo = TorchDynamoPlugin(backend=self.dynamo_backend)
        self.axes = self._axes()

    def _axes(self) -> ParallelismConfig | None:
        """Returns the sizes of axes that the script gives, or else its older plugin, or else the launcher."""
        if self.parallelism_config is not None:
            return self.parallelism_config
        if self.torch_tp_plugin is not None:
            return ParallelismConfig(tp_size=self.torch_tp_plugin.tp_size)
        asks = environment.snapshot().get("ACCELERATE_USE_PARALLELISM_CONFIG", "")
        return ParallelismConfig() if asks.lower() == "true" else None

    def _window_steps(self) -> int:
        """Returns the number of steps in a window: that of the variable, if it is set, as in accelerate."""
        steps = self.gradient_accumulation_steps
        said = environment.snapshot().get(_WINDOW_VARIABLE, "")
        # Other texts are refused where the settings of the run are read.
        if not said.isdecimal() or int(said) in (0, steps):
            return steps
        if steps != 1:
            warn_once(
                "compat", f"{_WINDOW_VARIABLE}={said} replaces `gradient_accumulation_steps={steps}` of the script."
            )
        return int(said)

    def native(self) -> RunArguments:
        """Returns what Paceline's own accelerator takes."""
        loading = self.loading
        options: dict[str, Mapping[str, Any]] | None = None
        ddp_handler = self.handlers["ddp_handler"]
        if ddp_handler is not None:
            options = {"replicate": ddp_handler.options()}
            if not ddp_handler.broadcast_buffers:
                # A model that runs twice before its backward pass needs this under `--zero 2` as well: buffers that autograd
                # has saved must not be written to by the broadcast of the second run.
                options["zero"] = {"broadcast_buffers": False}
        ao_handler = self.handlers["ao_recipe_handler"]
        if ao_handler is not None:
            options = {**(options or {}), "fp8": ao_handler.options()}
        scaler_handler = self.handlers["scaler_handler"]
        init_handler = self.handlers["init_handler"]
        timeout_s: float | None = None
        if init_handler is not None and init_handler.said("timeout"):
            timeout_s = init_handler.timeout.total_seconds()
        overrides = Overrides(
            mixed_precision=agreed_precision(self.mixed_precision),
            accumulate=None if self.window.num_steps == 1 else self.window.num_steps,
            cpu=self.cpu or is_forced_to_cpu() or None,
            timeout_s=timeout_s,
            split_batches=loading.split_batches,
            dispatch_batches=loading.dispatch_batches,
            even_batches=loading.even_batches,
            data_seed=loading.data_seed,
            non_blocking=loading.non_blocking,
            plan=self._plan(),
            options=options,
        )
        return RunArguments(
            overrides=overrides,
            scaler=None if scaler_handler is None else scaler_handler.to_kwargs(),
            project_dir=self.project.project_dir,
            semantics=self._semantics(),
        )

    def _semantics(self) -> Semantics:
        """Returns how the loop is meant, of which arguments of the script decide a part."""
        schedule: Literal["step", "process", "call"] = "process"
        if not self.step_scheduler_with_optimizer:
            schedule = "call"
        elif self.loading.split_batches:
            schedule = "step"
        return replace(
            ACCELERATE,
            epoch_ends_window=self.window.sync_with_dataloader,
            tail="pad" if self.loading.even_batches else "divide",
            order="dealt, seeded" if self.loading.use_seedable_sampler else "dealt",
            schedule=schedule,
        )

    def _plan(self) -> list[Given]:
        """Returns the fields of the plugins that the script has given; `engines` translates them into Paceline's settings."""
        # accelerate leaves batch norms as they are. A command line, a variable or a file overrides this default.
        given = [Given("options.batch_norm.statistics", "local", "default", "as under accelerate")]
        # The first plugin of DeepSpeed counts until a script selects another.
        for deepspeed_plugin in list(self.plugins.values())[:1]:
            given += deepspeed_plugin.said()
        for plugin in (self.fsdp_plugin, self.parallelism_config, self.torch_tp_plugin, self.dynamo_plugin):
            if plugin is not None:
                given += said_by(plugin)
        if self.fsdp_plugin is not None:
            given.append(Given("use_fsdp", "true", "code", "Accelerator(fsdp_plugin=...)"))
        for name in ("tp", "cp", "sp"):
            handler = getattr(self.parallelism_config, f"{name}_handler", None)
            if handler is not None:
                given += said_by(handler)
        if self.dynamo_backend is not None and self.dynamo_plugin is None:
            backend = str(self.dynamo_backend)
            given.append(Given("dynamo_backend", backend, "code", "Accelerator(dynamo_backend=...)"))
        return given

    def _check_arguments(self) -> None:
        """Raises all problems of the arguments at once."""
        problems = []
        wrong_plugins = [plugin for plugin in self.plugins.values() if not isinstance(plugin, DeepSpeedPlugin)]
        for name, value in (("deepspeed_plugin", wrong_plugins), ("megatron_lm_plugin", self.megatron_lm_plugin)):
            if value:
                problems.append(_problem(f"{name} is not carried", f"{name}={value!r}", _FIXES[name]))
        if self.deepspeed_plugin is not None and self.deepspeed_plugins is not None:
            what = "you cannot pass in both `deepspeed_plugin` and `deepspeed_plugins`"
            why = f"deepspeed_plugin={self.deepspeed_plugin!r} and deepspeed_plugins={self.deepspeed_plugins!r}"
            problems.append(_problem(what, why, "remove one of them"))
        problems += [_problem(what, why, NATIVE_FLOAT8) for what, why in self._other_float8()]
        steps = self.gradient_accumulation_steps
        if self.gradient_accumulation_plugin is not None and steps != 1:
            what = "you can only pass one of gradient_accumulation_steps and gradient_accumulation_plugin"
            why = f"gradient_accumulation_steps={steps} and {self.gradient_accumulation_plugin}"
            problems.append(_problem(what, why, "say the length once, in the plugin"))
        handler_classes = [type(handler) for handler in self.kwargs_handlers or ()]
        others = (TERecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs)  # a problem of their own
        unknown_classes = [handler for handler in handler_classes if handler not in (*HANDLERS.values(), *others)]
        known_names = ", ".join(handler.__name__ for handler in HANDLERS.values())
        for handler_class in dict.fromkeys(handler_classes):
            name = handler_class.__name__
            if handler_class in unknown_classes:
                what = f"unsupported kwargs handler passed: a {name}"
                problems.append(_problem(what, f"known: {known_names}", "leave it out"))
            elif handler_classes.count(handler_class) > 1:
                what = f"you can only pass one {name} in `kwargs_handlers`"
                problems.append(_problem(what, "only one can count", "merge them"))
        if not problems:
            return
        # accelerate raises an AssertionError for an unknown handler and a ValueError for the rest; scripts may catch either.
        if unknown_classes:
            raise UnknownHandler.of(problems)
        raise CompatValueError.of(problems)

    def _other_float8(self) -> Iterator[tuple[str, str]]:
        """Yields what asks for float8 by another library than torchao: a recipe, or the variable of `--fp8_backend`."""
        for handler in self.kwargs_handlers or ():
            if isinstance(handler, TERecipeKwargs | MSAMPRecipeKwargs):
                yield (
                    f"float8 is computed by torchao alone, and {type(handler).__name__} is for another library",
                    repr(handler),
                )
        variables = environment.snapshot()
        backend = variables.get("ACCELERATE_FP8_BACKEND", "")
        precision = self.mixed_precision or variables.get("ACCELERATE_MIXED_PRECISION", "")
        if backend.upper() in ("TE", "MSAMP") and text_of(precision) == "fp8":
            yield f"float8 is computed by torchao alone, and not by {backend}", f"ACCELERATE_FP8_BACKEND={backend}"

    def _check_plugins(self) -> None:
        """Checks the classes of FSDP's plugin and the parallelism config, and the backend of `torch.compile`."""
        expected_classes = {
            "fsdp_plugin": (self.fsdp_plugin, FullyShardedDataParallelPlugin),
            "parallelism_config": (self.parallelism_config, ParallelismConfig),
        }
        for name, (value, expected) in expected_classes.items():
            if value is not None and not isinstance(value, expected):
                what = f"{name} cannot be a {type(value).__name__}"
                raise CompatTypeError.of([_problem(what, f"it is {value!r}", f"give a `{expected.__name__}`")])
        backend = self.dynamo_backend
        if backend is not None and self.dynamo_plugin is not None:
            why = f"dynamo_backend={backend!r} and {self.dynamo_plugin}"
            raise CompatValueError.of(
                [_problem("you cannot pass in both `dynamo_plugin` and `dynamo_backend`", why, "remove one of them")]
            )
        word = None if backend is None else text_of(backend).upper()
        if word is not None and word not in DynamoBackend:
            why = f"dynamo_backend={backend!r}; known: {', '.join(DynamoBackend.list())}"
            raise CompatValueError.of([_problem(f"{word!r} is not a valid DynamoBackend", why, "use one of these")])


def checked_placement(placement: Sequence[bool], count: int) -> list[bool]:
    """Returns the argument `device_placement` of `prepare`.

    Raises:
        CompatValueError: `compat-argument`, if it has more or fewer elements than there are objects.
    """
    if len(placement) != count:
        raise CompatValueError(
            "compat-argument",
            f"`device_placement` should be a list with {count} elements, and has {len(placement)}.",
            why="it says for each object that is passed whether it is moved",
            fix=f"write device_placement={[True] * count}",
        )
    return list(placement)


def _problem(what: str, why: str, fix: str) -> Problem:
    return Problem("compat-argument", f"Accelerator: {what}.", why=why, fix=fix)
