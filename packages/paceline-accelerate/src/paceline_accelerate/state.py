"""accelerate's states: what scripts read from `PartialState()`, `AcceleratorState()` and `GradientState()`.

PartialState        this process among the others                one dictionary, shared by all instances
AcceleratorState    the same, and an accelerator's choices       one dictionary, shared by all instances
GradientState       the current accumulation window and loader   one for each accelerator; `GradientState()` shows that of the
                                                                 accelerator that was made last
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from paceline.base import env as environment
from paceline.config import Overrides, resolve_run
from paceline.world import rendezvous, runtime
from paceline.world.collectives import Collectives
from paceline.world.joining import join
from paceline.world.participant import Participant
from paceline.world.world import World
from paceline_accelerate.deepspeed_plugin import DeepSpeedPlugin
from paceline_accelerate.errors import CompatValueError
from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin
from paceline_accelerate.kinds import DistributedType, text_of, type_of_processes
from paceline_accelerate.launcher_variables import deepspeed_is_asked
from paceline_accelerate.own_device import own_device
from paceline_accelerate.split import split_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from paceline.accelerator import Accelerator
    from paceline_accelerate.parallelism_config import ParallelismConfig

_KNOWN = ["_cpu", "_mixed_precision", "_shared_state", "backend", "debug", "device", "distributed_type", "fork_launched",
          "local_process_index", "num_processes", "process_index"]  # fmt: skip


class ThreadLocalSharedDict(threading.local):
    """A dictionary that all instances of a class share, and of which each thread has its own.

    Args:
        thread_local: has no effect, because every dictionary of this class belongs to one thread.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[str, Any] = {}

    def __get__(self, owner: object, kind: type | None = None) -> dict[str, Any]:
        return self._storage

    def __set__(self, owner: object, value: dict[str, Any]) -> None:
        self._storage = value


def is_initialized() -> bool:
    """Whether an accelerator has been made."""
    return bool(AcceleratorState._shared_state)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing; `on_main_process` and its like return it in place of a function that another process runs."""


def distributed_type(world: World, device: torch.device) -> Any:
    """Returns accelerate's `DistributedType` for a world on a kind of device."""
    return type_of_processes(device.type, world.size)


def _detected_world() -> World:
    """Returns the world of this process; a single one of accelerate's launcher is told to be alone, and gets no group here.

    That launcher sets no variables of a world for a single process, and transformers warns of a group beside one process.
    A later `Accelerator` makes a group of one process, because the watch of hangs keeps its notes in the group's store.
    """
    world = World.detect()
    if world.size == 1 and "accelerate" in environment.get("PACELINE_COMPAT").split(","):
        return replace(world, source="single")
    return world


def wanted_device() -> str | None:
    """Returns the device that ACCELERATE_TORCH_DEVICE names, or None."""
    return environment.snapshot().get("ACCELERATE_TORCH_DEVICE") or None


class _Shared:
    """An attribute that is stored in the shared dictionary, so that scripts may set it.

    For some names it replaces a read-only property of `Participant`.

    Raises:
        AttributeError: if no state was made since the last `_reset_state`.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, state: Any, kind: type | None = None) -> Any:
        if state is None:
            return self
        try:
            return state.__dict__[self._name]
        except KeyError:
            raise AttributeError(f"{type(state).__name__} has no {self._name}") from None

    def __set__(self, state: Any, value: object) -> None:
        state.__dict__[self._name] = value


class PartialState(Participant):
    """Describes this process among the others; if there is no accelerator yet, making one initializes the process group.

    Args:
        cpu: whether to compute on the CPU although the host has an accelerator.
        options: options of the process group; only `timeout` is used, and the backend follows from the device.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attrs: ClassVar[list[str]] = _KNOWN
    device = _Shared()
    num_processes = _Shared()
    process_index = _Shared()
    local_process_index = _Shared()
    distributed_type = _Shared()
    debug = _Shared()
    backend = _Shared()
    fork_launched = _Shared()

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        self.__dict__ = self._shared_state
        # All instances are one state: only the first one after a reset joins the process group.
        if not self._shared_state:
            timeout = options.get("timeout")
            timeout_s = None
            if timeout:  # a `timedelta`, as for torch's `init_process_group`
                timeout_s = timeout.total_seconds()
            on_cpu = cpu or wanted_device() == "cpu"
            settings = resolve_run(Overrides(cpu=on_cpu or None, timeout_s=timeout_s)).settings
            collectives = join(_detected_world(), settings, runtime.current())
            self._shared_state.update(_described(collectives, cpu))
            self.device = torch.device(wanted_device() or collectives.device)
            if deepspeed_is_asked():
                self._shared_state["distributed_type"] = DistributedType.DEEPSPEED

    def __reduce__(self) -> tuple[Any, ...]:
        # transformers pickles a state with its training arguments. The process that unpickles it gets its own state, and not
        # the rank of the process that wrote it.
        return type(self), ()

    def __getattr__(self, name: str) -> Any:
        # Called only for names that the state does not have; accelerate's own explain here why.
        reason = f"'{type(self).__name__}' object has no attribute '{name}'"
        if name in self._known_attrs:
            reason += (
                f". There is none after `{type(self).__name__}._reset_state()`, until an `Accelerator` or a `PartialState` is "
                "made"
            )
        raise AttributeError(reason)

    @classmethod
    def _reset_state(cls) -> None:
        cls._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Whether there is a state to show."""
        return bool(self._shared_state)

    @property
    def default_device(self) -> torch.device:
        """The device that this process uses if neither a script nor a variable names another."""
        return own_device()

    # -- who does what -----------------------------------------------------------------------------------------------

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return bool(self.distributed_type != DistributedType.NO and self.num_processes > 1)

    def _only(self, function: Callable[..., Any], here: bool) -> Any:
        # A single process runs everything, also the part of a rank that does not exist.
        if here or not self.use_distributed:
            return function
        return do_nothing

    def _goes_first(self, is_main: bool) -> AbstractContextManager[None]:
        return self._first(is_main)

    @contextmanager
    def split_between_processes(self, inputs: object, apply_padding: bool = False) -> Iterator[Any]:
        """Gives each process its part; see `paceline_accelerate.split.split_part`."""
        yield split_part(inputs, self.process_index, self.num_processes, apply_padding)

    # -- the group ---------------------------------------------------------------------------------------------------

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, Any]:
        """Returns the backend and the kind of the processes. Both follow from the device, whatever the arguments say."""
        return self.backend, self.distributed_type

    def set_device(self) -> None:
        """Makes this process's device the current device of torch, if it has an index."""
        if self.device.type not in ("cpu", "meta") and self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroys the process group, or the one that is given."""
        if group is None:
            rendezvous.leave()
        elif dist.is_initialized():
            dist.destroy_process_group(group)

    def __repr__(self) -> str:
        backend = ""
        if self.backend:
            backend = f"  Backend: {self.backend}"
        return (
            f"Distributed environment: {self.distributed_type}{backend}\nNum processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\nLocal process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


def _described(collectives: Collectives, cpu: bool) -> dict[str, Any]:
    """Returns the content of the shared dictionaries: Paceline's names, and accelerate's names for the same."""
    world = collectives.world
    fork_launched = environment.snapshot().get("FORK_LAUNCHED", "0")
    # accelerate's state of a single process has no backend, whatever group a script may have made itself.
    backend = None
    if dist.is_initialized() and world.size > 1:
        backend = dist.get_backend()
    return {
        "world": world,
        "device": collectives.device,
        "collectives": collectives,
        "_trigger": False,
        "_cpu": cpu,
        "backend": backend,
        "debug": collectives.debug,
        "distributed_type": distributed_type(world, collectives.device),
        "num_processes": world.size,
        "process_index": world.rank,
        "local_process_index": world.local_rank,
        "fork_launched": fork_launched not in ("", "0", "false", "False"),
    }


class AcceleratorState(PartialState):
    """A `PartialState` that also shows the choices of an accelerator.

    Args:
        mixed_precision: must be that of the accelerator, if it is given.
        others: are accepted as accelerate's constructor names them; the accelerator's own values count.

    Raises:
        CompatValueError: `compat-argument`, if no accelerator was made, or if it computes in another precision.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    deepspeed_plugins: Mapping[str, DeepSpeedPlugin] | None = None
    fsdp_plugin: FullyShardedDataParallelPlugin  # set only where there is one
    device_mesh: DeviceMesh | None
    _known_attrs: ClassVar[list[str]] = [
        *_KNOWN,
        "deepspeed_plugin",
        "fsdp_plugin",
        "megatron_lm_plugin",
        "dynamo_plugin",
    ]

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: object = None,
        deepspeed_plugin: object = None,
        fsdp_plugin: object = None,
        torch_tp_plugin: object = None,
        megatron_lm_plugin: object = None,
        parallelism_config: object = None,
        _from_accelerator: bool = False,
        **options: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        if not self._shared_state:
            if not _from_accelerator:
                raise CompatValueError(
                    "compat-argument",
                    "there is no state yet: initialize your accelerator via `accelerator = Accelerator()` first.",
                    why="AcceleratorState() shows the accelerator that was made last",
                    fix="make one before `AcceleratorState()` is called",
                )
            plugins = {"dynamo_plugin": dynamo_plugin, "torch_tp_plugin": torch_tp_plugin}
            self._fill(vars(PartialState(cpu, **options)), mixed_precision or "no", plugins, parallelism_config)
        self._check_initialized(mixed_precision, cpu)

    def _fill(self, process: dict[str, Any], precision: str, plugins: dict[str, Any], axes: Any = None) -> None:
        """Replaces the content of the shared dictionary by a description of the process and an accelerator's choices."""
        self._shared_state.clear()
        self._shared_state.update(process)
        for name in ("deepspeed_plugins", "torch_tp_plugin", "dynamo_plugin", "device_mesh"):
            self._shared_state[name] = plugins.get(name)
        self._shared_state["parallelism_config"] = axes
        self._shared_state["_mixed_precision"] = precision

    @classmethod
    def of(
        cls,
        accelerator: Accelerator,
        fsdp: FullyShardedDataParallelPlugin | None,
        tensor: object,
        dynamo: object,
        deepspeed: Mapping[str, DeepSpeedPlugin],
        axes: ParallelismConfig | None,
        *,
        shows_wanted_device: bool,
    ) -> AcceleratorState:
        """Makes the shared state show an accelerator with its plugins, and returns it.

        The `DistributedType` is that of the plan: FSDP where it shards parameters.

        Args:
            axes: what the script has asked for; their mesh becomes `device_mesh`.
            shows_wanted_device: whether the state shows the device that a variable names, which is not the run's.
        """
        process = _described(accelerator.collectives, accelerator.settings.cpu)
        # `update` and not a new dictionary: other attributes that a script has set on the state stay.
        PartialState._shared_state.update(process)
        state = object.__new__(cls)
        state.__dict__ = cls._shared_state
        precision = accelerator.mixed_precision
        # For programs that communicate along an axis themselves; the plan has groups of its own.
        mesh = None if axes is None else axes.get_device_mesh(accelerator.device.type)
        plugins = {"torch_tp_plugin": tensor, "dynamo_plugin": dynamo, "device_mesh": mesh}
        state._fill(dict(PartialState._shared_state), precision, plugins, axes)
        if shows_wanted_device:
            state.device = torch.device(str(wanted_device()))
        if deepspeed:
            for plugin in deepspeed.values():
                plugin.set_mixed_precision(precision)
            state.deepspeed_plugins = deepspeed
            state.distributed_type = DistributedType.DEEPSPEED
            # An earlier accelerator, or the script, may have selected one already.
            if state.deepspeed_plugin is None:
                state.select_deepspeed_plugin(next(iter(deepspeed)))
        elif accelerator.plan.layout.size("shard", "tp") > 1:
            # transformers looks at the plugin to see how it saves a model. If the script does not choose, a whole state is
            # right, because that is what `get_state_dict` returns.
            fsdp = fsdp or FullyShardedDataParallelPlugin()
            if fsdp.said("state_dict_type") is None:
                fsdp.set_state_dict_type("FULL_STATE_DICT")
            state.distributed_type = DistributedType.FSDP
        # Without the plugin the state has no such attribute, as under accelerate.
        if fsdp is not None:
            state.fsdp_plugin = fsdp
        return state

    def _check_initialized(self, mixed_precision: str | None = None, cpu: bool | None = None) -> None:
        """Refuses another precision than the accelerator's."""
        precision = self._shared_state.get("_mixed_precision", "no")
        wanted = text_of(mixed_precision)
        if mixed_precision is not None and wanted != precision:
            raise CompatValueError(
                "compat-argument",
                f"AcceleratorState has already been initialized with mixed_precision={precision!r}, and cannot be changed "
                f"to {mixed_precision!r}.",
                why="the precision is one for all accelerators of a process, as under accelerate",
                fix="give the same mixed_precision each time, or call `AcceleratorState._reset_state(True)` in between",
            )

    @property
    def mixed_precision(self) -> str:
        """The accelerator's precision."""
        return str(self._mixed_precision)

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The DeepSpeed plugin that is selected; None where the run does not use DeepSpeed."""
        for plugin in (self.deepspeed_plugins or {}).values():
            if plugin.selected:
                return plugin
        return None

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Returns the DeepSpeed plugin of a name.

        Raises:
            CompatValueError: `compat-argument`, where there is none.
        """
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            raise CompatValueError(
                "compat-argument",
                f"there is no DeepSpeed plugin called {name!r}.",
                why=f"plugins of this accelerator: {', '.join(plugins) or 'none'}",
                fix="name it in `Accelerator(deepspeed_plugins={...})`",
            )
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Selects the plugin that models prepared from now on use."""
        chosen = self.get_deepspeed_plugin(str(name))
        for plugin in (self.deepspeed_plugins or {}).values():
            if plugin is not chosen:
                plugin._unselect()
        chosen.select(_from_accelerator_state=True)

    @property
    def is_fsdp2(self) -> bool:
        """Whether the plan shards parameters and the script asked for version 2 of FSDP."""
        version = getattr(self.__dict__.get("fsdp_plugin"), "fsdp_version", 1)
        return bool(self.distributed_type == DistributedType.FSDP and version == 2)

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        cls._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


def deepspeed_plugins_of(
    plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None, plugins: Mapping[str, DeepSpeedPlugin] | None
) -> dict[str, DeepSpeedPlugin]:
    """Returns the DeepSpeed plugins of an accelerator by name.

    They come from its arguments, or else from an earlier accelerator, or else from the launcher's variables.

    Args:
        plugin: one plugin, or several by name.
        plugins: several plugins by name.
    """
    argument = plugins if plugin is None else plugin
    if isinstance(argument, Mapping):
        return dict(argument)
    if argument is not None:
        return {"default": argument}
    earlier = AcceleratorState._shared_state.get("deepspeed_plugins")
    if earlier:
        return dict(earlier)
    if deepspeed_is_asked():
        return {"default": DeepSpeedPlugin()}
    return {}
