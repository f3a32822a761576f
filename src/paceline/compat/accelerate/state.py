"""accelerate's states: what scripts ask of `PartialState()`, `AcceleratorState()` and `GradientState()`.

There they are process-global and own everything. Here they are views: each accelerator has its own, and the class
called without one shows the accelerator that was made last.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from paceline.compat.accelerate.fsdp_plugin import FullyShardedDataParallelPlugin
from paceline.compat.accelerate.kinds import DistributedType
from paceline.config import resolve_run
from paceline.world import rendezvous, runtime
from paceline.world.collectives import Collectives
from paceline.world.participant import Participant
from paceline.world.world import World

_KINDS = {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU", "npu": "MULTI_NPU", "mlu": "MULTI_MLU", "xpu": "MULTI_XPU",
          "hpu": "MULTI_HPU", "musa": "MULTI_MUSA", "sdaa": "MULTI_SDAA"}  # fmt: skip


def is_initialized() -> bool:
    """Whether an accelerator was made."""
    return bool(AcceleratorState._shared_state)


def distributed_type(world: World, device: torch.device) -> Any:
    """accelerate's word for a world of one or more processes on a kind of device."""
    return DistributedType.NO if world.size == 1 else DistributedType(_KINDS.get(device.type, "MULTI_GPU"))


class PartialState(Participant):
    """This process among the others; made without an accelerator, it forms the process group.

    Args:
        cpu: compute on the CPU although there is an accelerator.
        options: of the process group; `timeout` counts, the backend follows from the device.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        self.__dict__ = self._shared_state
        if not self._shared_state:
            seconds = options["timeout"].total_seconds() if options.get("timeout") else None
            told = resolve_run({"cpu": cpu or None, "timeout_s": seconds}).settings
            world = rendezvous.join(World.detect(), cpu=told.cpu, timeout_s=told.timeout_s)
            device = torch.device(world.device)
            talk = runtime.current().collectives(world, device) or Collectives(
                world, device=device, debug=told.debug, timeout_s=told.timeout_s, hang_report_s=told.hang_report_s
            )
            super().__init__(world, device, talk)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # transformers pickles it with its arguments: it is that of the process that reads them

    @classmethod
    def _reset_state(cls) -> None:
        cls._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Whether there is a state to show."""
        return bool(self._shared_state)

    @property
    def distributed_type(self) -> Any:
        """accelerate's word for this setup."""
        return distributed_type(self.world, self.device)

    @property
    def backend(self) -> str | None:
        """Backend of the process group; None without one."""
        return dist.get_backend() if dist.is_initialized() else None

    @property
    def default_device(self) -> torch.device:
        """What `device` would be if nobody had said otherwise."""
        return torch.accelerator.current_accelerator() or torch.device("cpu")

    @property
    def debug(self) -> bool:
        """Whether collectives are checked."""
        return self.collectives.debug

    @property
    def fork_launched(self) -> bool:
        """Never asked of us: processes are told nothing by how they were started."""
        return False

    def set_device(self) -> None:
        """Done already."""

    def destroy_process_group(self, group: Any = None) -> None:
        """Leaves the group."""
        if group is None:
            rendezvous.leave()

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}\nNum processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\nLocal process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class AcceleratorState(PartialState):
    """`PartialState` and the choices of an accelerator."""

    _shared_state: ClassVar[dict[str, Any]] = {}
    deepspeed_plugin = fsdp_plugin = megatron_lm_plugin = torch_tp_plugin = dynamo_plugin = None
    use_ipex = False

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **options: Any) -> None:
        if not self._shared_state:
            self._shared_state.update(vars(PartialState(cpu)), mixed_precision=mixed_precision or "no")
        self.__dict__ = self._shared_state

    @classmethod
    def of(cls, accelerator: Any) -> AcceleratorState:
        """The view of one accelerator; the classes called without one show it from now on."""
        seen = dict(world=accelerator.world, device=accelerator.device, collectives=accelerator.collectives)
        state = object.__new__(cls)
        state.__dict__ = {**seen, "mixed_precision": accelerator.mixed_precision}
        for shared, values in ((PartialState._shared_state, seen), (cls._shared_state, state.__dict__)):
            shared.clear()
            shared.update(values)
        return state

    def adopt(self, accelerator: Any, fsdp: Any, tensor: Any, dynamo: Any) -> None:
        """Plugins of the accelerator, and the word for what its plan does: FSDP where parameters may be divided."""
        told = {"fsdp_plugin": fsdp, "torch_tp_plugin": tensor, "dynamo_plugin": dynamo}
        if accelerator.plan.layout.shard > 1:
            # Who saves a model looks here for how: without a word, the whole model is what `get_state_dict` gives.
            plugin = fsdp or FullyShardedDataParallelPlugin()
            if plugin.said("state_dict_type") is None:
                plugin.set_state_dict_type("FULL_STATE_DICT")
            told |= {"fsdp_plugin": plugin, "_distributed_type": DistributedType.FSDP}
        told = {name: value for name, value in told.items() if value is not None}
        self.__dict__.update(told)
        self._shared_state.update(told)

    @property
    def distributed_type(self) -> Any:
        """accelerate's word for this setup."""
        return self.__dict__.get("_distributed_type") or super().distributed_type

    @property
    def is_fsdp2(self) -> bool:
        """Whether a script asked for version 2 of FSDP, and gets it."""
        version = getattr(self.fsdp_plugin, "fsdp_version", 1)
        return bool(self.distributed_type == DistributedType.FSDP and version == 2)

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        cls._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()


class GradientState:
    """The accumulation window and the loader that is being iterated, of one accelerator."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self.__dict__ = self._shared_state

    @classmethod
    def of(cls, accelerator: Any, plugin: Any) -> GradientState:
        """The view of one accelerator."""
        state = object.__new__(cls)
        # Weak: the class must not keep a finished run's models alive.
        state.__dict__ = {"_accelerator": weakref.ref(accelerator), "plugin_kwargs": plugin.to_kwargs()}
        cls._shared_state.clear()
        cls._shared_state.update(state.__dict__)
        return state

    @classmethod
    def _reset_state(cls) -> None:
        cls._shared_state.clear()

    def _of_accelerator(self, name: str) -> Any:
        accelerator = self.__dict__["_accelerator"]() if "_accelerator" in self.__dict__ else None
        return None if accelerator is None else getattr(accelerator, name)

    @property
    def initialized(self) -> bool:
        """Whether an accelerator was made."""
        return bool(self.__dict__)

    @property
    def sync_gradients(self) -> bool:
        """Whether the window ends with this micro-batch."""
        gradients = self._of_accelerator("gradients")
        return True if gradients is None else gradients.sync

    def _set_sync_gradients(self, value: bool) -> None:
        self._of_accelerator("gradients").sync = value

    @property
    def num_steps(self) -> int:
        """Micro-batches in a window."""
        gradients = self._of_accelerator("gradients")
        return 1 if gradients is None else gradients.steps

    adjust_scheduler = property(lambda self: self.__dict__.get("plugin_kwargs", {}).get("adjust_scheduler", False))
    sync_with_dataloader = property(
        lambda self: self.__dict__.get("plugin_kwargs", {}).get("sync_with_dataloader", True)
    )
    sync_each_batch = property(lambda self: self.__dict__.get("plugin_kwargs", {}).get("sync_each_batch", False))

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that is being iterated, or None."""
        run = self._of_accelerator("run")
        return None if run is None else run.active_loaders.top

    @property
    def dataloader_references(self) -> list[Any]:
        """Loaders that are being iterated, the current one last."""
        return [self.active_dataloader] if self.in_dataloader else []

    is_xla_gradients_synced = False

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its epoch."""
        loader = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples of a last batch that is not full; -1 outside of loops."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder
