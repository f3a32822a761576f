"""The arguments of accelerate's `Accelerator`: checks them, and translates them into arguments of Paceline's own.

Only `accelerator` calls this module. A check collects all problems before it raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.base.errors import Problem
from paceline.compat.accelerate.arguments import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from paceline.compat.accelerate.deepspeed_plugin import DeepSpeedPlugin
from paceline.compat.accelerate.errors import CompatTypeError, CompatValueError, UnknownHandler
from paceline.compat.accelerate.fsdp_plugin import FullyShardedDataParallelPlugin
from paceline.compat.accelerate.kinds import DynamoBackend, PrecisionType, text_of
from paceline.compat.accelerate.parallelism_config import ParallelismConfig
from paceline.compat.accelerate.state import AcceleratorState, is_initialized, wanted_device
from paceline.compat.fsdp import said_by
from paceline.config.given import Given
from paceline.world.world import World

# Attribute of the accelerator -> class of the handler that it shows.
HANDLERS = {
    "ddp_handler": DistributedDataParallelKwargs,
    "scaler_handler": GradScalerKwargs,
    "init_handler": InitProcessGroupKwargs,
    "autocast_handler": AutocastKwargs,
    "profile_handler": ProfileKwargs,
}
# Plugin that cannot be used -> what to do instead.
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


def check_arguments(
    plugins: Mapping[str, object],
    precision: str | None,
    steps: int,
    accumulation: GradientAccumulationPlugin | None,
    handlers: Sequence[KwargsHandler] | None,
) -> None:
    """Raises all problems of the arguments at once.

    Args:
        plugins: name of an argument -> its value if that cannot be used; an empty value is no problem.
        precision, steps, accumulation, handlers: the arguments `mixed_precision`, `gradient_accumulation_steps`,
            `gradient_accumulation_plugin` and `kwargs_handlers`.

    Raises:
        CompatValueError, UnknownHandler: `compat-argument`.
    """
    problems = []
    for name, value in plugins.items():
        if value:
            problems.append(_problem(f"{name} is not carried", f"{name}={value!r}", _FIXES[name]))
    if text_of(precision) == "fp8":
        what = "8-bit training is not built yet"
        problems.append(_problem(what, "mixed_precision='fp8'", "use mixed_precision='bf16'"))
    if accumulation is not None and steps != 1:
        what = "you can only pass one of gradient_accumulation_steps and gradient_accumulation_plugin"
        why = f"gradient_accumulation_steps={steps} and {accumulation}"
        problems.append(_problem(what, why, "say the length once, in the plugin"))
    handler_classes = [type(handler) for handler in handlers or ()]
    unknown_classes = [handler for handler in handler_classes if handler not in HANDLERS.values()]
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


def handlers_by_name(handlers: Sequence[KwargsHandler]) -> dict[str, Any]:
    """Returns the handler of each class, or None, under the name of the accelerator's attribute."""
    by_name: dict[str, Any] = {}
    for name, handler_class in HANDLERS.items():
        by_name[name] = next((handler for handler in handlers if isinstance(handler, handler_class)), None)
    return by_name


def said_by_handlers(handlers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of Paceline's own accelerator that the handlers give.

    Args:
        handlers: the result of `handlers_by_name`.
    """
    said: dict[str, Any] = {}
    ddp_handler = handlers["ddp_handler"]
    if ddp_handler is not None:
        said["options"] = {"replicate": ddp_handler.options()}
        if not ddp_handler.broadcast_buffers:
            # A model that runs twice before its backward pass needs this under `--zero 2` as well: buffers that autograd has
            # saved must not be written to by the broadcast of the second run.
            said["options"]["zero"] = {"broadcast_buffers": False}
    if handlers["scaler_handler"] is not None:
        said["scaler"] = handlers["scaler_handler"].to_kwargs()
    init_handler = handlers["init_handler"]
    if init_handler is not None and init_handler.said("timeout"):
        said["timeout_s"] = init_handler.timeout.total_seconds()
    return said


def check_plugins(fsdp: Any, axes: Any, dynamo: Any, backend: Any) -> None:
    """Checks the plugins of FSDP and dynamo, and the parallelism config.

    Args:
        fsdp, axes, dynamo, backend: the arguments `fsdp_plugin`, `parallelism_config`, `dynamo_plugin` and `dynamo_backend`.

    Raises:
        CompatTypeError: `compat-argument`, for an object of another class.
        CompatValueError: `compat-argument`, for an unknown backend, or one beside a plugin.
    """
    expected_classes = {
        "fsdp_plugin": (fsdp, FullyShardedDataParallelPlugin),
        "parallelism_config": (axes, ParallelismConfig),
    }
    for name, (value, expected) in expected_classes.items():
        if value is not None and not isinstance(value, expected):
            what = f"{name} cannot be a {type(value).__name__}"
            raise CompatTypeError.of([_problem(what, f"it is {value!r}", f"give a `{expected.__name__}`")])
    if backend is not None and dynamo is not None:
        why = f"dynamo_backend={backend!r} and {dynamo}"
        raise CompatValueError.of(
            [_problem("you cannot pass in both `dynamo_plugin` and `dynamo_backend`", why, "remove one of them")]
        )
    word = None if backend is None else text_of(backend).upper()
    if word is not None and word not in DynamoBackend:
        why = f"dynamo_backend={backend!r}; known: {', '.join(DynamoBackend.list())}"
        raise CompatValueError.of([_problem(f"{word!r} is not a valid DynamoBackend", why, "use one of these")])


def said_by_plugins(
    fsdp: FullyShardedDataParallelPlugin | None,
    axes: ParallelismConfig | None,
    tensor: object,
    dynamo: Any,
    backend: Any,
    deepspeed: Mapping[str, DeepSpeedPlugin],
) -> list[Given]:
    """Returns the fields of the plugins that the script has given; `engines` translates them into Paceline's settings.

    Args:
        fsdp, axes: of `check_plugins`.
        tensor: a `TorchTensorParallelPlugin`, or None.
        dynamo: a `TorchDynamoPlugin`, or None.
        backend: of `torch.compile`, in place of that plugin.
        deepspeed: plugins by name; the first one counts until a script selects another.
    """
    # accelerate leaves batch norms as they are. A command line, a variable or a file overrides this default.
    given = [Given("options.batch_norm.statistics", "local", "default", "as under accelerate")]
    for deepspeed_plugin in list(deepspeed.values())[:1]:
        given += deepspeed_plugin.said()
    for plugin in (fsdp, axes, tensor, dynamo):
        if plugin is not None:
            given += said_by(plugin)
    if fsdp is not None:
        given.append(Given("use_fsdp", "true", "code", "Accelerator(fsdp_plugin=...)"))
    for name in ("tp", "cp", "sp"):
        handler = getattr(axes, f"{name}_handler", None)
        if handler is not None:
            given += said_by(handler)
    if backend is not None and dynamo is None:
        given.append(Given("dynamo_backend", str(backend), "code", "Accelerator(dynamo_backend=...)"))
    return given


def _problem(what: str, why: str, fix: str) -> Problem:
    return Problem("compat-argument", f"Accelerator: {what}.", why=why, fix=fix)
