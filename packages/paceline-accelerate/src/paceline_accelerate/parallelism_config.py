"""accelerate's `ParallelismConfig`: the sizes of the axes of a plan, and the device mesh that they make.

A script passes it as `Accelerator(parallelism_config=...)`. `engine_fields` says what each field means in a plan.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from paceline.base import env as environment
from paceline.base.errors import CompatError
from paceline.plan.plan import Plan
from paceline_accelerate.engine_fields import AXES, CONTEXT_HANDLER, SEQUENCE_HANDLER
from paceline_accelerate.errors import CompatRuntimeError
from paceline_accelerate.said_fields import SaidFields

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from paceline.world.layout import Layout


# The order of the axes in a mesh, the outermost first.
_ORDER = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_ATTENTION_NAMES = ("flash_attention_2", "flash_attention_3", "sdpa")
_BACKENDS = {"cp_backend": ("torch",), "sp_backend": ("deepspeed",)}


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallel."""

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn(
                "Async tensor parallelism is currently not supported: the option has no effect.", stacklevel=3
            )


@dataclass
class TorchContextParallelConfig(SaidFields):
    """Options of context parallel."""

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        said = self.fill_from_environment(CONTEXT_HANDLER)
        self.cp_comm_strategy = self.cp_comm_strategy or "allgather"
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ValueError(
                f"Invalid cp_comm_strategy: {self.cp_comm_strategy}. Must be one of 'allgather' or 'alltoall'."
            )
        self.remember(said)


@dataclass
class DeepSpeedSequenceParallelConfig(SaidFields):
    """Options of sequence parallel in the form of DeepSpeed's Ulysses."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        said = self.fill_from_environment(SEQUENCE_HANDLER, but="sp_seq_length")
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = True
        elif isinstance(self.sp_seq_length_is_variable, str):
            self.sp_seq_length_is_variable = environment.parse_bool(self.sp_seq_length_is_variable)
        if not self.sp_seq_length_is_variable:
            self._set_length()
        attention = self.sp_attn_implementation
        # A kernel of Hugging Face's hub has a name with a slash.
        if attention is not None and attention not in _ATTENTION_NAMES and "/" not in attention:
            raise ValueError(f"Invalid sp_attn_implementation: {attention}. Must be one of {list(_ATTENTION_NAMES)}")
        self.remember(said)

    def _set_length(self) -> None:
        variable = "PARALLELISM_CONFIG_SP_SEQ_LENGTH"
        length = environment.snapshot().get(variable)
        if self.sp_seq_length is None and length:
            self.sp_seq_length = int(length)
        if self.sp_seq_length is None:
            raise ValueError(
                "`sp_seq_length` must be provided if `sp_seq_length_is_variable` is False, either as an argument or as "
                f"{variable}."
            )


@dataclass(repr=False)
class ParallelismConfig(SaidFields):
    """The sizes of the axes. Sizes that are left None are filled from PARALLELISM_CONFIG_* variables, else they are 1.

    Args:
        dp_replicate_size, dp_shard_size, tp_size, cp_size, sp_size: sizes of the axes.
        cp_backend: "torch".
        sp_backend: "deepspeed".
        tp_handler, cp_handler, sp_handler: options of an axis; None is the default options if the axis is larger than 1.

    Attributes:
        device_mesh: the mesh, once `get_device_mesh` has built it.

    Raises:
        ValueError: sizes below 1, an unknown backend, or axes that cannot be combined.
    """

    dp_replicate_size: int = None  # type: ignore[assignment]
    dp_shard_size: int = None  # type: ignore[assignment]
    tp_size: int = None  # type: ignore[assignment]
    cp_size: int = None  # type: ignore[assignment]
    cp_backend: str = None  # type: ignore[assignment]
    sp_size: int = None  # type: ignore[assignment]
    sp_backend: str = None  # type: ignore[assignment]
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None

    # Without an annotation, so that it is no field.
    device_mesh = None

    def __post_init__(self) -> None:
        said = self.fill_from_environment(AXES)
        for axis in _ORDER:
            size = getattr(self, f"{axis}_size")
            # The value of a variable is text.
            setattr(self, f"{axis}_size", 1 if size is None else int(size))
        self.cp_backend = self.cp_backend or "torch"
        self.sp_backend = self.sp_backend or "deepspeed"
        self._check()
        if self.tp_size > 1 and self.tp_handler is None:
            self.tp_handler = TorchTensorParallelConfig()
        if self.cp_size > 1 and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig()
        if self.sp_size > 1 and self.sp_handler is None:
            self.sp_handler = DeepSpeedSequenceParallelConfig()
        self.remember(said)

    def _check(self) -> None:
        for axis in _ORDER:
            size = getattr(self, f"{axis}_size")
            if size < 1:
                raise ValueError(f"{axis}_size must be at least 1, but got {size}")
        for name, backends in _BACKENDS.items():
            if getattr(self, name) not in backends:
                raise ValueError(f"{name} must be one of {list(backends)}, but got {getattr(self, name)}")
        handler = self.cp_handler
        if self.cp_size > 1 and handler is not None and not isinstance(handler, TorchContextParallelConfig):
            raise ValueError(
                f"cp_backend={self.cp_backend} requires a TorchContextParallelConfig, but cp_handler was set to {type(handler)}"
            )
        divides_model = self.tp_size > 1 or self.cp_size > 1
        if divides_model and self.dp_replicate_size > 1 and self.dp_shard_size == 1:
            raise ValueError(
                "Tensor/Context parallelism (tp/cp_size > 1) cannot be used with pure data parallelism (dp_replicate_size > 1 "
                "and dp_shard_size == 1): set dp_shard_size to more than 1 too, or dp_replicate_size to 1."
            )
        if self.cp_size > 1 and self.sp_size > 1:
            raise ValueError(
                "Context Parallelism (CP) and Sequence Parallelism (SP) are mutually exclusive: "
                f"cp_size={self.cp_size} and sp_size={self.sp_size}. Set one of them to 1."
            )

    def __repr__(self) -> str:
        sizes = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "sp_size", "sp_backend")
        lines = [f"\t{name}={getattr(self, name)}" for name in (*sizes, "total_size")]
        rows = ",\n".join(lines)
        # As accelerate writes it: with this space, and without a comma before the handlers.
        handlers = f"\ttp_handler={self.tp_handler},\n\tcp_handler={self.cp_handler}"
        return f"ParallelismConfig(\n {rows}\n{handlers})\n"

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain values."""
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            is_block = is_dataclass(value) and not isinstance(value, type)
            values[field.name] = asdict(value) if is_block else value
        return values

    # -- axes ------------------------------------------------------------------------------------------------

    def _active(self, *axes: str) -> list[str]:
        """Returns those of the axes that are larger than 1."""
        return [axis for axis in axes if getattr(self, f"{axis}_size") > 1]

    dp_replicate_enabled = property(lambda self: self.dp_replicate_size > 1)
    dp_shard_enabled = property(lambda self: self.dp_shard_size > 1)
    tp_enabled = property(lambda self: self.tp_size > 1)
    cp_enabled = property(lambda self: self.cp_size > 1)
    sp_enabled = property(lambda self: self.sp_size > 1)
    # accelerate has two names for this.
    fsdp_enabled = property(lambda self: self.dp_shard_size > 1)
    dp_dim_names = property(lambda self: self._active("dp_replicate", "dp_shard"))
    non_dp_dim_names = property(lambda self: self._active("tp", "cp", "sp"))
    dp_shard_cp_dim_names = property(lambda self: self._active("dp_shard", "cp"))
    dp_cp_dim_names = property(lambda self: self._active("dp_replicate", "dp_shard", "cp"))
    # `build_device_mesh` joins the axes `dp_shard` and `cp` under the name "dp_shard_cp".
    fsdp_dim_names = property(lambda self: [*self._active("dp_replicate"), "dp_shard_cp"])
    active_mesh_dims = property(lambda self: self.dp_dim_names + self.non_dp_dim_names)
    data_parallel_size = property(lambda self: self.dp_replicate_size * self.dp_shard_size)
    non_data_parallel_size = property(lambda self: self.tp_size * self.cp_size * self.sp_size)
    total_size = property(lambda self: self.data_parallel_size * self.non_data_parallel_size)

    # -- the mesh --------------------------------------------------------------------------------------------

    def _get_mesh(self) -> tuple[Any, ...]:
        """Returns names and sizes of the axes of the mesh, in its order; an empty tuple if all sizes are 1."""
        names = tuple(self._active(*_ORDER))
        sizes = tuple(getattr(self, f"{axis}_size") for axis in names)
        return (names, sizes) if names else ()

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Builds the mesh of all ranks; returns None if all sizes are 1, or where DeepSpeed makes the groups of `sp` itself.

        Ranks: all; the process group must exist.
        """
        mesh = self._get_mesh()
        if not mesh or (self.sp_enabled and self.sp_backend == "deepspeed"):
            return None
        from torch.distributed.device_mesh import init_device_mesh

        from paceline.torch_internals.device_mesh import flattened

        names, sizes = mesh
        device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        joined_axes = {
            "dp": self.dp_dim_names,
            "dp_shard_cp": self.dp_shard_cp_dim_names,
            "dp_cp": self.dp_cp_dim_names,
        }
        for name, axes in joined_axes.items():
            if axes:
                # The mesh remembers it, and `device_mesh[name]` finds it.
                flattened(device_mesh[axes], name)
        return device_mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Returns the mesh, which the first call builds. Ranks: all.

        Raises:
            ValueError: the first call names no type of device, or a later one another type than the mesh has.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError("You need to pass a device_type, such as cuda, to build the device mesh")
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type is not None and self.device_mesh.device_type != device_type:
            raise ValueError(f"The mesh is for {self.device_mesh.device_type}, and {device_type} was asked for.")
        return self.device_mesh

    def _set_size(self, parallelism: str, size: int) -> None:
        """Sets the size of one axis."""
        if f"{parallelism}_size" not in self.__dataclass_fields__:
            raise ValueError(f"Parallelism must be one of {list(_ORDER)}, but got {parallelism}")
        setattr(self, f"{parallelism}_size", size)

    def cover(self, layout: Layout) -> None:
        """Takes the plan's sizes along the axes of data where the sizes leave out ranks; accelerate refuses such sizes."""
        if 1 < self.total_size < layout.size() and not self.sp_enabled:
            self._set_size("dp_replicate", layout.size("replicate"))
            self._set_size("dp_shard", layout.size("shard"))

    def _validate_accelerator(self, accelerator: _Placed) -> None:
        """Takes the replicas of a plan where the script says no size. That sizes and processes agree, the plan has checked."""
        if self.total_size == 1 and accelerator.num_processes > 1:
            self._set_size("dp_replicate", accelerator.num_processes)


class _Placed(Protocol):
    """The part of an accelerator that says where its process stands."""

    parallelism_config: Any

    @property
    def process_index(self) -> int: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def plan(self) -> Plan: ...


def rank_along(accelerator: _Placed, axis: str) -> int:
    """Returns the coordinate of this rank along an axis of the plan.

    Raises:
        CompatRuntimeError: `compat-argument`, where neither the script nor the launcher has asked for the axis.
    """
    layout = accelerator.plan.layout
    if accelerator.parallelism_config is None and layout.size(axis) == 1:
        raise CompatRuntimeError(
            "compat-argument",
            f"the axis {axis!r} is not configured.",
            why="neither `parallelism_config` nor the plan asks for it",
            fix="pass `Accelerator(parallelism_config=ParallelismConfig(...))`",
        )
    return layout.coordinate(accelerator.process_index)[axis]


def no_rank_along(accelerator: object) -> NoReturn:
    """Raises an error for a stage or a part of a sequence, because accelerate has no such property either."""
    raise CompatError(
        "compat-argument", "a rank's stage is no property.", why="accelerate has none", fix="leave it out"
    )
