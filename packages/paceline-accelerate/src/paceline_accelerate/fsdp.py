"""Lists what accelerate's argument objects say, under the names of the table in `paceline_accelerate.engine_fields`.

Fields that may hold torch's objects (wrapping policies, `MixedPrecision`, `CPUOffload`) are read as words and numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from paceline.base.errors import CompatError, Problem
from paceline.config.given import Given
from paceline_accelerate.engine_fields import ROWS
from paceline_accelerate.said_fields import SaidFields
from paceline_accelerate.torch_internals.kept import wrapped_classes

_DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


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
            given += _policy(value, where)
        elif row.attribute == "ignored_modules":
            given += _ignored(row.name, value, where, problems)
        elif is_function:
            given += _wrapping(value, where, problems)
        else:
            given.append(Given(row.name, plain(value), "code", where))
    if problems:
        raise CompatError.of(problems)
    return given


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


def _policy(value: object, where: str) -> list[Given]:
    """Reads the fields of a `MixedPrecision`, a `MixedPrecisionPolicy`, a mapping of the same names, or one dtype for all."""
    if isinstance(value, Mapping):
        dtypes = dict(value)
    elif is_dataclass(value):
        dtypes = {field.name: getattr(value, field.name) for field in fields(value)}
    else:
        dtypes = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), value)
    given = []
    for name, dtype in dtypes.items():
        if dtype is not None:
            given.append(Given(f"fsdp_mixed_precision_policy.{name}", plain(dtype), "code", where))
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
    if name == "size_based_auto_wrap_policy" and arguments.keys() <= {"min_num_params"}:
        given = [Given("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", "code", where)]
        min_params = arguments.get("min_num_params")
        if min_params is not None:
            given.append(Given("fsdp_min_num_params", int(min_params), "code", where))
        return given
    # A policy with further arguments does something that no setting can express.
    if not arguments and (classes or name == "transformer_auto_wrap_policy"):
        wrapped = sorted(kind.__name__ for kind in classes) if classes else "auto"
        return [
            Given("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "code", where),
            Given("fsdp_transformer_layer_cls_to_wrap", wrapped, "code", where),
        ]
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
