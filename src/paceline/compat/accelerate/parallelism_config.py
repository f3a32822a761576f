"""accelerate's `ParallelismConfig`: sizes of the axes, which are a plan here, and the mesh that they make."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from paceline.base import env as environment
from paceline.compat.accelerate.said_fields import SaidFields

# The order of the axes in a mesh, the outermost first.
_ORDER = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "sdpa")
_BACKENDS = {"cp_backend": ("torch",), "sp_backend": ("deepspeed",)}


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallel."""

    enable_async_tp: bool = False


@dataclass
class TorchContextParallelConfig(SaidFields):
    """Options of context parallel."""

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        said = _fill(self)
        self.cp_comm_strategy = self.cp_comm_strategy or "allgather"
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ValueError(
                f"Invalid cp_comm_strategy: {self.cp_comm_strategy}. Must be one of 'allgather' or 'alltoall'."
            )
        self.remember(said)


@dataclass
class DeepSpeedSequenceParallelConfig(SaidFields):
    """Options of Ulysses."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        said = _fill(self, but=("sp_seq_length",))
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = True
        elif isinstance(self.sp_seq_length_is_variable, str):
            self.sp_seq_length_is_variable = environment.parse_bool(self.sp_seq_length_is_variable)
        attention = self.sp_attn_implementation
        # A kernel of the hub has a name with a slash.
        if attention is not None and attention not in _ATTENTIONS and "/" not in attention:
            raise ValueError(f"Invalid sp_attn_implementation: {attention}. Must be one of {list(_ATTENTIONS)}")
        self.remember(said)


def _fill(config: Any, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Takes PARALLELISM_CONFIG_* for fields that are None; returns what code and variables say."""
    env = environment.snapshot()
    said = {}
    from_environment = []
    for field in fields(config):
        value = getattr(config, field.name)
        variable = env.get(f"PARALLELISM_CONFIG_{field.name.upper()}")
        if value is not None:
            said[field.name] = value
        elif variable and field.name not in but:
            said[field.name] = variable
            from_environment.append(field.name)
            setattr(config, field.name, variable)
    config.from_environment = tuple(from_environment)
    return said


@dataclass(repr=False)
class ParallelismConfig(SaidFields):
    """Sizes of the axes; what a plan of ours is.

    Raises:
        ValueError: sizes below 1, an unknown backend, or axes that do not go together.
    """

    dp_replicate_size: Any = None
    dp_shard_size: Any = None
    tp_size: Any = None
    cp_size: Any = None
    cp_backend: Any = None
    sp_size: Any = None
    sp_backend: Any = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    device_mesh = None

    def __post_init__(self) -> None:
        said = _fill(self, but=("tp_handler", "cp_handler", "sp_handler"))
        for axis in _ORDER:
            size = getattr(self, f"{axis}_size")
            size = 1 if size is None else int(size)
            setattr(self, f"{axis}_size", size)
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
        rows = ",\n".join(f"\t{name}={getattr(self, name)}" for name in (*sizes, "total_size"))
        # As accelerate writes it: with this space, and without a comma before the handlers.
        handlers = f"\ttp_handler={self.tp_handler},\n\tcp_handler={self.cp_handler}"
        return f"ParallelismConfig(\n {rows}\n{handlers})\n"

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values[field.name] = asdict(value) if is_dataclass(value) else value
        return values

    # -- axes ------------------------------------------------------------------------------------------------

    def _active(self, *axes: str) -> list[str]:
        """Those of some axes that divide anything."""
        return [axis for axis in axes if getattr(self, f"{axis}_size") > 1]

    dp_replicate_enabled = property(lambda self: self.dp_replicate_size > 1)
    dp_shard_enabled = property(lambda self: self.dp_shard_size > 1)
    tp_enabled = property(lambda self: self.tp_size > 1)
    cp_enabled = property(lambda self: self.cp_size > 1)
    sp_enabled = property(lambda self: self.sp_size > 1)
    # Whether parameters are divided.
    fsdp_enabled = property(lambda self: self.dp_shard_size > 1)
    dp_dim_names = property(lambda self: self._active("dp_replicate", "dp_shard"))
    non_dp_dim_names = property(lambda self: self._active("tp", "cp", "sp"))
    dp_shard_cp_dim_names = property(lambda self: self._active("dp_shard", "cp"))
    dp_cp_dim_names = property(lambda self: self._active("dp_replicate", "dp_shard", "cp"))
    # The mesh has the last of them under this name: `dp_shard` and `cp` in one.
    fsdp_dim_names = property(lambda self: [*self._active("dp_replicate"), "dp_shard_cp"])
    active_mesh_dims = property(lambda self: self.dp_dim_names + self.non_dp_dim_names)
    data_parallel_size = property(lambda self: self.dp_replicate_size * self.dp_shard_size)
    non_data_parallel_size = property(lambda self: self.tp_size * self.cp_size * self.sp_size)
    total_size = property(lambda self: self.data_parallel_size * self.non_data_parallel_size)

    # -- the mesh --------------------------------------------------------------------------------------------

    def _get_mesh(self) -> tuple[Any, ...]:
        """Names and sizes of the axes of the mesh, in its order; empty where nothing is divided."""
        names = self._active(*_ORDER)
        sizes = tuple(getattr(self, f"{axis}_size") for axis in names)
        return (tuple(names), sizes) if names else ()

    def build_device_mesh(self, device_type: str) -> Any:
        """The mesh of all ranks, or None where nothing is divided.

        Ranks: all; the process group is formed before.
        """
        mesh = self._get_mesh()
        if not mesh:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        from paceline.torch_internals.device_mesh import flattened

        names, sizes = mesh
        built = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        for axes, name in (
            (self.dp_dim_names, "dp"),
            (self.dp_shard_cp_dim_names, "dp_shard_cp"),
            (self.dp_cp_dim_names, "dp_cp"),
        ):
            if axes:
                flattened(built[tuple(axes)], name)
        self.device_mesh = built
        return built

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """The mesh, built at the first call.

        Raises:
            ValueError: the first call does not name a kind of device, or another one than the mesh has.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError("You need to pass a device_type, such as cuda, to build the device mesh")
            return self.build_device_mesh(device_type)
        if device_type is not None and self.device_mesh.device_type != device_type:
            raise ValueError(f"The mesh is for {self.device_mesh.device_type}, and {device_type} was asked for.")
        return self.device_mesh

    def _set_size(self, parallelism: str, size: int) -> None:
        """Sets the size of one axis."""
        if f"{parallelism}_size" not in self.__dataclass_fields__:
            raise ValueError(f"Parallelism must be one of {list(_ORDER)}, but got {parallelism}")
        setattr(self, f"{parallelism}_size", size)
