"""Translates the arguments of torch's `FSDP(model, ...)` into a plan.

    FSDP(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, auto_wrap_policy=partial(size_based_..., ...))
    plan_from(sharding_strategy=..., auto_wrap_policy=...)
        -> {"plan": {"zero": 2}, "options": {"shard": {"wrap": "size", ...}}, "notes": [...]}
    Accelerator(plan=..., options=...)

The table in `paceline_accelerate.engine_fields` says what becomes of each keyword.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import CompatError, ConfigError, Problem
from paceline.config import options
from paceline.config.given import Given, nearest
from paceline.config.sources import nodes_of
from paceline.torch_internals.fsdp import wrapped_classes
from paceline_accelerate import engines
from paceline_accelerate.engine_fields import FIELDS, MIXED, ROWS, TORCH
from paceline_accelerate.said_fields import SaidFields

_DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_PRECISIONS = {"float32": "no"}  # names of precisions where they differ from those of dtypes
_NAMES = {  # keywords of `fully_shard`
    "mp_policy": "mixed_precision",
    "offload_policy": "cpu_offload",
    "mesh": "device_mesh",
    "ignored_params": "ignored_states",
}


def plan_from(**keywords: Any) -> dict[str, Any]:
    """Returns the arguments of `Accelerator` that correspond to `FSDP(model, ...)` or `fully_shard(model, ...)`.

    Args:
        keywords: keyword arguments of torch's `FullyShardedDataParallel` or `fully_shard`.

    Returns:
        A dictionary with `plan` and `options` for `Accelerator`, and `notes` on what has no effect here, and why.

    Raises:
        ConfigError: `config-key`, `accelerate-feature`, `config-value`, `fsdp-object`, with all problems at once.

    Example:
        settings = plan_from(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        accelerator = Accelerator(plan=settings["plan"], options=settings["options"])
    """
    problems: list[Problem] = []
    said: list[Given] = []
    if not keywords.get("sharding_strategy"):
        said.append(Given("use_fsdp", "true", "code", "FSDP(...)"))  # torch's default shards everything
    for name, value in keywords.items():
        said += _read(_NAMES.get(name, name), value, f"FSDP({name}=...)", problems)
    translated = engines.translate(said, nodes_of(environment.snapshot()))
    problems += translated.problems
    if problems:
        raise ConfigError.of(problems)
    plan: dict[str, Any] = {}
    for given in translated.given:
        if not given.name.startswith(f"{options.NAME}."):
            plan[given.name] = given.value
    if "mixed_precision" in plan:
        plan["mixed_precision"] = _PRECISIONS.get(plan["mixed_precision"], plan["mixed_precision"])
    return {
        "plan": plan,
        "options": options.merge(translated.given)[0],
        "notes": list(engines.notices(translated.unused)),
    }


def said_by(plugin: object, place: str = "") -> list[Given]:
    """Lists what an argument object of accelerate's says, under the names that the table has for its fields.

    Args:
        plugin: an instance of one of accelerate's classes that the table has as an owner.
        place: how the script passed it, for messages; "" stands for the name of its class.

    Raises:
        CompatError: `fsdp-object`, all at once.
    """
    owner = type(plugin).__name__
    given: list[Given] = []
    problems: list[Problem] = []
    for row in ROWS:
        if row.owner != owner or not row.attribute:
            continue
        if isinstance(plugin, SaidFields):
            value = plugin.said(row.attribute)
        else:
            value = getattr(plugin, row.attribute, None)
        if value is None or value == "":
            continue
        if row.attribute in getattr(plugin, "from_environment", ()):
            given.append(Given(row.name, plain(value), "environment", row.variable))
            continue
        where = f"{place or owner}({row.attribute}=...)"
        is_function = row.attribute == "auto_wrap_policy" and not isinstance(value, str)
        if row.attribute == "mixed_precision_policy":
            given += _policy(value, where, "fsdp_mixed_precision_policy")
        elif row.attribute == "ignored_modules" or is_function:
            # These fields may hold torch's objects, so they are read like torch's own keywords.
            for keyword in _read(row.attribute, value, where, problems):
                given += _as_plugin(keyword)
        else:
            given.append(Given(row.name, plain(value), "code", where))
    if problems:
        raise CompatError.of(problems)
    return given


def _as_plugin(keyword: Given) -> list[Given]:
    """Renames a keyword of torch's to the names of the plugin's fields."""
    name = keyword.name.rpartition(".")[2]
    if name != "auto_wrap_policy":
        return [replace(keyword, name=f"fsdp_{name}")]
    if keyword.value == "size":
        return [replace(keyword, name="fsdp_auto_wrap_policy", value="SIZE_BASED_WRAP")]
    return [
        replace(keyword, name="fsdp_auto_wrap_policy", value="TRANSFORMER_BASED_WRAP"),
        replace(keyword, name="fsdp_transformer_layer_cls_to_wrap"),
    ]


def plain(value: Any) -> Any:
    """Converts torch's objects to words, numbers and booleans if some say the same; other values stay unchanged."""
    if isinstance(value, Enum):
        # torch's enumerations have numbers for values, accelerate's have words.
        if isinstance(value, str):
            return value.value
        return value.name
    # Classes are compared by name, because this module is also imported where torch is not.
    kind = type(value).__name__
    if kind == "CPUOffload":
        return bool(value.offload_params)
    if kind in ("CPUOffloadPolicy", "OffloadPolicy"):
        return kind == "CPUOffloadPolicy"
    if kind in ("dtype", "str"):
        return _DTYPES.get(str(value).removeprefix("torch."), value)
    return value


def _read(name: str, value: object, where: str, problems: list[Problem]) -> list[Given]:
    """Reads one keyword of torch's as values of the table's rows."""
    row = f"{TORCH.rpartition('.')[2]}.{name}"
    if row not in FIELDS:
        keywords = [entry.attribute for entry in FIELDS.values() if entry.owner == TORCH]
        fix = "leave it out"
        near = nearest(name, keywords)
        if near:
            fix = f"write {near!r}"
        problems.append(Problem("config-key", f"FSDP has no keyword {name!r}.", f"it stands in {where}", fix))
        return []
    if value is None:
        return []
    if name == "mixed_precision":
        return _policy(value, where, MIXED.rpartition(".")[2])
    if name == "auto_wrap_policy" and not isinstance(value, str):
        return _wrapping(value, where, problems)
    if name in ("ignored_modules", "ignored_states"):
        return _ignored(row, value, where, problems)
    return [Given(row, plain(value), "code", where)]


def _policy(value: object, where: str, owner: str) -> list[Given]:
    """Reads the fields of a `MixedPrecision`, a `MixedPrecisionPolicy`, a mapping of the same names, or one dtype for all."""
    if isinstance(value, Mapping):
        dtypes = dict(value)
    elif is_dataclass(value):
        dtypes = {field.name: getattr(value, field.name) for field in fields(value)}
    else:
        dtypes = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), value)
    given = []
    for name, dtype in dtypes.items():
        row_name = f"{owner}.{name}"
        if row_name not in FIELDS:
            row_name = f"{MIXED.rpartition('.')[2]}.{name}"
        if dtype is not None:
            given.append(Given(row_name, plain(dtype), "code", where))
    return given


def _wrapping(policy: Any, where: str, problems: list[Problem]) -> list[Given]:
    """Reads one of torch's wrapping policies; a function that a script wrote cannot be read."""
    function = policy
    arguments: dict[str, Any] = {}
    if isinstance(policy, functools.partial):
        function = policy.func
        arguments = dict(policy.keywords)
    name = getattr(function, "__name__", type(function).__name__)
    classes = arguments.pop("transformer_layer_cls", None) or arguments.pop("module_classes", None)
    if not classes:
        classes = wrapped_classes(policy)
    owner = TORCH.rpartition(".")[2]
    if name == "size_based_auto_wrap_policy" and arguments.keys() <= {"min_num_params"}:
        given = [Given(f"{owner}.auto_wrap_policy", "size", "code", where)]
        min_params = arguments.get("min_num_params")
        if min_params is not None:
            given.append(Given(f"{owner}.min_num_params", int(min_params), "code", where))
        return given
    # A policy with further arguments does something that no setting can express.
    if classes and not arguments:
        names = sorted(kind.__name__ for kind in classes)
        return [Given(f"{owner}.auto_wrap_policy", names, "code", where)]
    if name == "transformer_auto_wrap_policy" and not arguments:
        return [Given(f"{owner}.auto_wrap_policy", "auto", "code", where)]
    problems.append(
        Problem(
            "fsdp-object",
            f"{name} cannot be read.",
            f"it stands in {where}; size_based_auto_wrap_policy, transformer_auto_wrap_policy and ModuleWrapPolicy can",
            "name the classes: options={'shard': {'wrap': ['Block']}}",
        )
    )
    return []


def _ignored(row: str, value: object, where: str, problems: list[Problem]) -> list[Given]:
    """Reads names or patterns of ignored modules; objects are refused, because no model is known yet that names them."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        entries = list(value)
    else:
        entries = [value]
    if all(isinstance(entry, str) for entry in entries):
        # torch takes a regular expression, and a plan a pattern with `*`.
        patterns = [entry.replace(r"\.", ".").replace(".*", "*") for entry in entries]
        if not patterns:
            return []
        return [Given(row, patterns, "code", where)]
    kinds = sorted({type(entry).__name__ for entry in entries})
    problems.append(
        Problem(
            "fsdp-object",
            f"objects of {', '.join(kinds)} cannot be left out by themselves.",
            f"they stand in {where}; plans name modules by class, or by a pattern of names",
            f"write options={{'shard': {{'ignored': {kinds}}}}}",
        )
    )
    return []
