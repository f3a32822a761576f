"""The table of all fields of accelerate's engines and what becomes of each; mapping, docs and tests are derived from it.

    means   {"zero": 2}            Paceline's settings and options with the same meaning
    why     "..."                  the reason why the field has no effect here
    fix     "..."                  the field is refused; this is what to do instead

A field can be given as a key of `fsdp_config:`, `parallelism_config:` and `dynamo_config:`, as a flag of `accelerate launch`,
as an environment variable, as an attribute of a plugin, or as a keyword of torch's `FSDP(...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from paceline_accelerate.kinds import DynamoBackend
from paceline_doors.cases import NODES, VALUE, Case


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
        name: its name as a flag and as a key in a file.
        cases: what its values mean; the first case that fits is used.
        owner: the class that has it as an attribute.
        attribute: its name in that class; "" stands for the name of the field without its prefix.
        variable: its environment variable; "" if there is none.
        default: accelerate's own default values, separated by |; no notice is given for them.
        needs: fields without which it has no effect, such as "use_fsdp=true".
        takes: True for a flag with a value, False for a flag without one, None if there is no flag.
    """

    name: str
    cases: tuple[Case, ...]
    owner: str
    attribute: str = ""
    variable: str = ""
    default: str = ""
    needs: tuple[str, ...] = ()
    takes: bool | None = True


# Owners of fields.
PLUGIN = "FullyShardedDataParallelPlugin"
AXES = "ParallelismConfig"
TENSOR = "TorchTensorParallelPlugin"
DYNAMO = "TorchDynamoPlugin"
TENSOR_HANDLER = "TorchTensorParallelConfig"
CONTEXT_HANDLER = "TorchContextParallelConfig"
SEQUENCE_HANDLER = "DeepSpeedSequenceParallelConfig"
ASKS_NOTHING = "it asks for nothing"


def _dotted(means: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings under their names. A keyword cannot have a dot, so it has two underscores in place of each."""
    return {name.replace("__", "."): value for name, value in means.items()}


def _true(**means: Any) -> Case:
    return Case("true", _dotted(means))


def _asks_nothing(value: str = "false") -> Case:
    return Case(value, why=ASKS_NOTHING)


def _idle(why: str, value: str = "*") -> Case:
    return Case(value, why=why)


_SHARDINGS: Mapping[str, Mapping[str, Any]] = {
    "FULL_SHARD|1": {"zero": 3},
    "SHARD_GRAD_OP|2": {"zero": 2},
    "NO_SHARD|3": {"zero": 0},
    "HYBRID_SHARD|4": {"zero": 3, "replicate": NODES},
    "HYBRID_SHARD_ZERO2|_HYBRID_SHARD_ZERO2|5": {"zero": 2, "replicate": NODES},
}
_STRATEGIES = tuple(Case(value, means) for value, means in _SHARDINGS.items())
_RESHARD = "options.shard.reshard"
# Reasons why a field has no effect, or is refused.
_WAITS = "units are gathered one ahead in the backward pass, whatever is said"
_NAMES = "parameters keep their names and stay the ones that you made"
_SYNC = "rank 0's values go to all ranks when a model is prepared"
_STATES = "`get_state_dict` and `save_model` give whole tensors under every plan, and checkpoints load at any width"
_GROUPS = "groups follow from the sizes of the axes"
_LIMIT = "at most two units are whole at a time"
_LOADING = "every rank builds the model; one that is built on the meta device takes no memory until it is prepared"


def _fsdp(
    name: str,
    *cases: Case,
    attribute: str = "",
    variable: str | None = None,
    default: str = "",
    needs: tuple[str, ...] = (),
    takes: bool | None = True,
) -> Field:
    if variable is None:
        variable = f"FSDP_{name.upper()}"
    needs = ("use_fsdp=true", *needs)
    return Field(f"fsdp_{name}", cases, PLUGIN, attribute or name, variable, default, needs, takes)


_FSDP = (
    Field(
        "use_fsdp",
        (
            Case("true", {"zero": 3}, unless=("fsdp_sharding_strategy", "fsdp_reshard_after_forward")),
            _asks_nothing(),
        ),
        PLUGIN,
        "",
        "ACCELERATE_USE_FSDP",
        "false",
        takes=False,
    ),
    _fsdp("version", _idle("FSDP2 serves both"), attribute="fsdp_version", default="1|2"),
    _fsdp(
        "reshard_after_forward",
        Case("true", {"zero": 3, _RESHARD: "yes"}),
        Case("false", {"zero": 3, _RESHARD: "no"}),
        *(Case(value, means, unless=("fsdp_sharding_strategy",)) for value, means in _SHARDINGS.items()),
    ),
    _fsdp("sharding_strategy", *_STRATEGIES),
    _fsdp(
        "auto_wrap_policy",
        Case("TRANSFORMER_BASED_WRAP", {"options.shard.wrap": "auto"}, unless=("fsdp_transformer_layer_cls_to_wrap",)),
        Case("SIZE_BASED_WRAP", {"options.shard.wrap": "size"}),
        Case("NO_WRAP", {"options.shard.wrap": "none"}),
    ),
    _fsdp(
        "transformer_layer_cls_to_wrap",
        Case("*", {"options.shard.wrap": VALUE}),
        attribute="transformer_cls_names_to_wrap",
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        needs=("fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",),
    ),
    _fsdp(
        "min_num_params",
        Case("0", {"options.shard.wrap": "none"}),
        Case("*", {"options.shard.min_params": VALUE}),
        needs=("fsdp_auto_wrap_policy=SIZE_BASED_WRAP",),
        default="100000000",
    ),
    _fsdp("offload_params", _true(offload="all"), _asks_nothing(), attribute="cpu_offload"),
    _fsdp("activation_checkpointing", _true(recompute="blocks"), _asks_nothing()),
    _fsdp(
        "activation_checkpointing_offload",
        Case("true", why="inputs of blocks stay where they are", fix="leave it out: fsdp_activation_checkpointing alone"),
        _asks_nothing(),
    ),
    _fsdp("backward_prefetch", _idle(_WAITS), default="BACKWARD_PRE"),
    _fsdp("forward_prefetch", _true(options__shard__prefetch=1), _asks_nothing()),
    _fsdp("ignored_modules", Case("*", {"options.shard.ignored": VALUE}), takes=None),
    _fsdp("mixed_precision_policy", _idle("its own fields are read, in the rows below"), variable="", takes=None),
    _fsdp(
        "state_dict_type",
        Case("LOCAL_STATE_DICT|2", why="no rank has a state of its own", fix="use SHARDED_STATE_DICT"),
        _idle(_STATES),
        default="FULL_STATE_DICT|SHARDED_STATE_DICT|1|3",
    ),
    _fsdp("state_dict_config", _idle(_STATES), variable="", takes=None),
    _fsdp("optim_state_dict_config", _idle(_STATES), variable="", takes=None),
    _fsdp("limit_all_gathers", _idle(_LIMIT), variable="", default="true", takes=None),
    _fsdp("use_orig_params", _idle(_NAMES), default="true|false"),
    _fsdp("param_init_fn", _idle("a model on the meta device is given values by its own `reset_parameters`"),
          variable="", takes=None),
    _fsdp("sync_module_states", _idle(_SYNC), default="true|false"),
    _fsdp("cpu_ram_efficient_loading", _idle(_LOADING), default="false"),
)  # fmt: skip


def _axis(name: str, *cases: Case, owner: str = AXES, default: str = "") -> Field:
    variable = f"PARALLELISM_CONFIG_{name.upper()}"
    return Field(f"parallelism_config_{name}", cases, owner, name, variable, default)


def _size(name: str, **means: Any) -> Field:
    return _axis(name, _asks_nothing("1|none"), Case("*", _dotted(means)), default="1|none")


_PARALLELISM = (
    _size("dp_replicate_size", replicate=VALUE),
    _size("dp_shard_size", shard=VALUE),
    _size("tp_size", tp=VALUE),
    _size("cp_size", cp=VALUE),
    _axis("cp_backend", _idle("the plan's own context parallel serves it"), default="torch"),
    _axis(
        "cp_comm_strategy",
        _idle("how parts travel round the ring follows from the backend"),
        owner=CONTEXT_HANDLER,
        default="allgather",
    ),
    _size("sp_size", cp=VALUE, options__context__method="ulysses"),
    _axis("sp_backend", _idle("the plan's own all-to-all serves it"), default="deepspeed"),
    _axis("sp_seq_length", _idle("sequences may have any length"), owner=SEQUENCE_HANDLER),
    _axis("sp_seq_length_is_variable", _idle("sequences may have any length"), owner=SEQUENCE_HANDLER, default="true|false"),
    _axis(
        "sp_attn_implementation",
        _asks_nothing("sdpa"),
        Case("*", why="attention is divided where the model calls torch's", fix="use attn_implementation='sdpa'"),
        owner=SEQUENCE_HANDLER,
        default="sdpa",
    ),
    Field("parallelism_config_enable_async_tp", (_idle("torch overlaps what it can by itself"),), TENSOR_HANDLER,
          "enable_async_tp", default="false", takes=None),
    *(
        Field(f"parallelism_config_{name}_handler", (_idle("its own fields are read, in the rows below"),), AXES,
              f"{name}_handler", default="none", takes=None)
        for name in ("tp", "cp", "sp")
    ),
    Field("torch_tp_size", (_asks_nothing("1|none"), Case("*", {"tp": VALUE})), TENSOR, "tp_size", default="1", takes=None),
    Field(
        "torch_tp_device_mesh",
        (_asks_nothing("none"), Case("*", why=_GROUPS, fix="leave it out: tp_size says it")),
        TENSOR,
        "torch_device_mesh",
        default="none",
        takes=None,
    ),
)  # fmt: skip

_BACKENDS = "|".join(name.lower() for name in DynamoBackend.list() if name not in ("NO", "INDUCTOR"))
_COMPILES = (f"dynamo_backend=inductor|{_BACKENDS}",)


def _dynamo(
    name: str, *cases: Case, flag: str = "", needs: bool = True, default: str = "", takes: bool | None = False
) -> Field:
    flag = flag or f"use_{name}"
    variable = f"ACCELERATE_DYNAMO_{flag.upper()}" if takes is not None else ""
    needed = _COMPILES if needs else ()
    return Field(f"dynamo_{flag}", cases, DYNAMO, name, variable, default, needed, takes)


_COMPILE = (
    _dynamo("backend", _asks_nothing("no|none|false"), Case("inductor", {"compile": True}),
            Case(_BACKENDS, {"compile": True, "options.compile.backend": VALUE}), flag="backend", needs=False, takes=True),
    _dynamo("mode", _asks_nothing("default|none"), Case("*", {"options.compile.mode": VALUE}), flag="mode", takes=True,
            default="default|none"),
    _dynamo("fullgraph", _true(options__compile__fullgraph="yes"), _asks_nothing(), default="false|none"),
    _dynamo("dynamic", _true(options__compile__dynamic="yes"), _asks_nothing("false|none"), default="false|none"),
    _dynamo("use_regional_compilation", _idle("the repeated blocks are compiled one by one, always"),
            flag="use_regional_compilation", default="true|false|none"),
    _dynamo("options", _asks_nothing("none"),
            Case("*", why="they are the backend's own", fix="call `torch.compile(model, options=...)` before `prepare`"),
            flag="options", takes=None),
    _dynamo("disable", Case("true", {"compile": False}), _asks_nothing(), flag="disable", takes=None),
)  # fmt: skip


def _policy(name: str, *cases: Case, default: str = "none") -> Field:
    owner = f"{PLUGIN}.mixed_precision_policy"
    return Field(f"fsdp_mixed_precision_policy.{name}", cases, owner, name, "", default, ("use_fsdp=true",), None)


# The fields of torch's two policies, which `paceline_accelerate.fsdp` reads one by one. Those with a reason have no effect.
_POLICY = (
    *(_policy(name, Case("*", {f"options.shard.{name}": VALUE}), default="")
      for name in ("param_dtype", "reduce_dtype", "output_dtype")),
    _policy("buffer_dtype", _asks_nothing("none"), _idle("buffers keep their dtype, and autocast casts what needs it")),
    _policy("keep_low_precision_grads", _idle("gradients have the dtype of their parameters"), default="false"),
    _policy("cast_forward_inputs", _idle("autocast casts inputs, once"), default="true|false"),
    _policy("cast_root_forward_inputs", _idle("autocast casts inputs, once"), default="true|false"),
    # The default is the text of torch's own.
    _policy("_module_classes_to_ignore", _idle("autocast keeps float32 where an operation needs it"),
            default="(<class 'torch.nn.modules.batchnorm._BatchNorm'>,)"),
)  # fmt: skip

ROWS = (*_FSDP, *_POLICY, *_PARALLELISM, *_COMPILE)
# Name that earlier releases of accelerate wrote into files -> the present name.
_OLDER = {
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
    "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
}
_BY_NAME = {row.name: row for row in ROWS}
FIELDS: Mapping[str, Field] = MappingProxyType(_BY_NAME | {old: _BY_NAME[new] for old, new in _OLDER.items()})
