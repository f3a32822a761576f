"""What the arguments of accelerate's `Accelerator` mean here; and what is refused, all problems at once."""

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
from paceline.compat.accelerate.kinds import DynamoBackend, PrecisionType
from paceline.compat.accelerate.parallelism_config import ParallelismConfig
from paceline.compat.accelerate.plugins import TorchDynamoPlugin
from paceline.compat.accelerate.state import AcceleratorState, is_initialized, wanted_device
from paceline.compat.fsdp import said_by
from paceline.config.given import Given
from paceline.world.world import World

HANDLERS = {
    "ddp_handler": DistributedDataParallelKwargs,
    "scaler_handler": GradScalerKwargs,
    "init_handler": InitProcessGroupKwargs,
    "autocast_handler": AutocastKwargs,
    "profile_handler": ProfileKwargs,
}
_WAYS = {
    "deepspeed_plugin": "give one `DeepSpeedPlugin`, or several by name: `deepspeed_plugins={'student': ..., 'teacher': ...}`",
    "megatron_lm_plugin": "native: `paceline.Accelerator(plan={'tp': 2, 'pp': 2})`",
}


def agreed_precision(wanted: str | None) -> str | None:
    """The precision of this accelerator: that of the process, where an accelerator was made before.

    Raises:
        CompatValueError: `compat-argument`, for another one, or a word that is no precision.
    """
    word = None if wanted is None else str(getattr(wanted, "value", wanted))
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
    """The error of an ACCELERATE_TORCH_DEVICE that this process would not take by itself; None where it would.

    It is for `prepare` to raise: the states show such a device before, as under accelerate.
    """
    wanted = wanted_device()
    if wanted is None:
        return None
    device = torch.device(wanted)
    if device.type == "cpu":
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    local_rank = World.detect().local_rank
    # A variable that is the same for all processes names the first device, and each takes its own.
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
    window: GradientAccumulationPlugin | None,
    handlers: Sequence[KwargsHandler] | None,
) -> None:
    """Raises all problems of the arguments at once.

    Args:
        plugins: name of an argument -> what cannot be served of it; an empty value is no problem.
        precision, steps, window, handlers: the arguments `mixed_precision`, `gradient_accumulation_steps`,
            `gradient_accumulation_plugin` and `kwargs_handlers`.

    Raises:
        CompatValueError, UnknownHandler: `compat-argument`.
    """
    problems = []
    for name, value in plugins.items():
        if value:
            problems.append(_problem(f"{name} is not carried", f"{name}={value!r}", _WAYS[name]))
    if str(getattr(precision, "value", precision)) == "fp8":
        problems.append(
            _problem("8-bit training is not built yet", "mixed_precision='fp8'", "use mixed_precision='bf16'")
        )
    if window is not None and steps != 1:
        why = f"gradient_accumulation_steps={steps} and {window}"
        problems.append(
            _problem(
                "you can only pass one of gradient_accumulation_steps and gradient_accumulation_plugin",
                why,
                "say the length once, in the plugin",
            )
        )
    kinds = [type(handler) for handler in handlers or ()]
    for kind in dict.fromkeys(kinds):
        if kind not in HANDLERS.values():
            names = ", ".join(handler.__name__ for handler in HANDLERS.values())
            problems.append(
                _problem(f"unsupported kwargs handler passed: a {kind.__name__}", f"known: {names}", "leave it out")
            )
        elif kinds.count(kind) > 1:
            problems.append(
                _problem(
                    f"you can only pass one {kind.__name__} in `kwargs_handlers`", "only one can count", "merge them"
                )
            )
    if not problems:
        return
    # Accelerate raises a ValueError for most of them, and scripts may catch it.
    if all(kind in HANDLERS.values() for kind in kinds):
        raise CompatValueError.of(problems)
    raise UnknownHandler.of(problems)


def handlers_by_name(handlers: Sequence[KwargsHandler]) -> dict[str, Any]:
    """The argument object of each kind, or None, under the name of the accelerator's attribute."""
    by_name: dict[str, Any] = {}
    for name, kind in HANDLERS.items():
        of_kind = [handler for handler in handlers if isinstance(handler, kind)]
        by_name[name] = of_kind[0] if of_kind else None
    return by_name


def said_by_handlers(handlers: Mapping[str, Any]) -> dict[str, Any]:
    """What argument objects say, as arguments of the native accelerator."""
    said: dict[str, Any] = {}
    if handlers["ddp_handler"] is not None:
        said["options"] = {"replicate": handlers["ddp_handler"].options()}
    if handlers["scaler_handler"] is not None:
        said["scaler"] = handlers["scaler_handler"].to_kwargs()
    init_handler = handlers["init_handler"]
    if init_handler is not None and init_handler.said("timeout"):
        said["timeout_s"] = init_handler.timeout.total_seconds()
    return said


def check_plugins(fsdp: Any, axes: Any, dynamo: Any, backend: Any) -> None:
    """Looks at the plugins of FSDP and dynamo, and at the parallelism config.

    Raises:
        CompatTypeError: `compat-argument`, for another object than a plugin or a config.
        CompatValueError: `compat-argument`, for an unknown backend, or one beside a plugin.
    """
    kinds = {
        "fsdp_plugin": (fsdp, FullyShardedDataParallelPlugin),
        "parallelism_config": (axes, ParallelismConfig),
    }
    for name, (value, kind) in kinds.items():
        if value is not None and not isinstance(value, kind):
            what = f"{name} cannot be a {type(value).__name__}"
            raise CompatTypeError.of([_problem(what, f"it is {value!r}", f"give a `{kind.__name__}`")])
    if backend is not None and dynamo is not None:
        why = f"dynamo_backend={backend!r} and {dynamo}"
        raise CompatValueError.of(
            [_problem("you cannot pass in both `dynamo_plugin` and `dynamo_backend`", why, "leave one of them out")]
        )
    word = None if backend is None else str(getattr(backend, "value", backend)).upper()
    if word is not None and word not in DynamoBackend:
        why = f"dynamo_backend={backend!r}; known: {', '.join(DynamoBackend.list())}"
        raise CompatValueError.of([_problem(f"{word!r} is not a valid DynamoBackend", why, "use one of these")])


def dynamo_of(plugin: TorchDynamoPlugin | None, backend: str | None) -> TorchDynamoPlugin:
    """The plugin that the state shows: the one that was given, else one with the backend that was given."""
    return TorchDynamoPlugin(backend=backend) if plugin is None else plugin


def said_by_plugins(
    fsdp: FullyShardedDataParallelPlugin | None,
    axes: ParallelismConfig | None,
    tensor: object,
    dynamo: Any,
    backend: Any,
    deepspeed: Mapping[str, DeepSpeedPlugin],
) -> list[Given]:
    """What the plugins say, in accelerate's words; `engines` says it in ours.

    Args:
        tensor: a `TorchTensorParallelPlugin`, or None.
        dynamo: a `TorchDynamoPlugin`, or None.
        backend: of `torch.compile`, beside or in place of that plugin.
        deepspeed: by name; the first counts until a script selects another.
    """
    # Weaker than whatever a command line, a variable or a file says: accelerate leaves batch norms as they are.
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
