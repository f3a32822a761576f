"""Reads the values file of `--values`: what the pods of a run need besides an image, in the terms of Kubernetes.

    shm: 16Gi                         size of /dev/shm
    gpu: nvidia.com/gpu               the resource of which each process gets one
    resources: {memory: 200Gi, rdma/hca: 1}
    nodeSelector: {pool: a100}        and other fields of a pod or a container (`FIELDS`), as its specification has them

Each value is copied into the manifest unchanged. The cluster checks its content, and names the field that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paceline.base.errors import ConfigError, Problem, short_repr
from paceline.config import limits
from paceline.config.given import nearest

_TEXT, _LIST, _MAPPING, _BOOL = "text", "a list", "a mapping", "true or false"
_TYPES: Mapping[str, type | tuple[type, ...]] = {_TEXT: (str, int), _LIST: list, _MAPPING: dict, _BOOL: bool}

OURS = {"shm": _TEXT, "gpu": _TEXT, "resources": _MAPPING}
METADATA = {"labels": _MAPPING, "annotations": _MAPPING}
CONTAINER = {
    "env": _LIST,
    "envFrom": _LIST,
    "imagePullPolicy": _TEXT,
    "securityContext": _MAPPING,
    "volumeMounts": _LIST,
    "workingDir": _TEXT,
}
POD = {
    "affinity": _MAPPING,
    "dnsPolicy": _TEXT,
    "hostIPC": _BOOL,
    "hostNetwork": _BOOL,
    "imagePullSecrets": _LIST,
    "initContainers": _LIST,
    "nodeSelector": _MAPPING,
    "podSecurityContext": _MAPPING,
    "priorityClassName": _TEXT,
    "runtimeClassName": _TEXT,
    "schedulerName": _TEXT,
    "serviceAccountName": _TEXT,
    "tolerations": _LIST,
    "topologySpreadConstraints": _LIST,
    "volumes": _LIST,
}
FIELDS: Mapping[str, str] = {**OURS, **METADATA, **CONTAINER, **POD}
# A pod and a container both have a field `securityContext`, so that of the pod has another name in the file.
_OTHER_NAME = {"podSecurityContext": "securityContext"}


@dataclass(frozen=True)
class ManifestValues:
    """What a values file says.

    Attributes:
        shm: size of /dev/shm, a Kubernetes quantity.
        gpu: name of the resource of which each process gets one.
        resources: more resources of each pod: quantities, as text, by name.
        labels, annotations: of each pod.
        container, pod: fields of the container and of the pod, as their specifications have them.
    """

    shm: str = "8Gi"
    gpu: str = "nvidia.com/gpu"
    resources: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    container: Mapping[str, Any] = field(default_factory=dict)
    pod: Mapping[str, Any] = field(default_factory=dict)


def read(path: str) -> ManifestValues:
    """Reads a values file.

    Raises:
        ConfigError: `kubernetes-values`, with the line of each key that is wrong; `config-size`.
    """
    try:
        root = limits.compose(limits.read_text(Path(path), path), path)
        content = [(key, yaml.SafeLoader("").construct_document(node)) for key, node in _pairs(path, root)]
    except OSError as error:
        why = (error.strerror or "").lower()
        fix = "give the path of a YAML file, or remove --values"
        raise ConfigError("kubernetes-values", f"the values file {path} cannot be read.", why, fix) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = str(error).replace("\n", " ")
        raise ConfigError("kubernetes-values", f"{path} is not YAML.", why, "correct that line") from None
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    problems: list[Problem] = []
    for key, value in content:
        name = str(key.value)
        line = key.start_mark.line + 1
        problem = _problem(path, line, name, value)
        if name in lines:
            what = f"{path}:{line} sets {name} a second time."
            problem = Problem("kubernetes-values", what, f"first: line {lines[name]}", "keep one of the two")
        lines[name] = line
        if problem is not None:
            problems.append(problem)
        else:
            values[name] = value
    if problems:
        raise ConfigError.of(problems)
    return _values(values)


def _pairs(path: str, root: yaml.Node | None) -> list[tuple[yaml.Node, yaml.Node]]:
    """Returns the keys and values at the top level of a file."""
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        why = f"it begins with {short_repr(root.value)}"
        raise ConfigError("kubernetes-values", f"{path} holds no keys.", why, "write lines such as `shm: 16Gi`")
    pairs: list[tuple[yaml.Node, yaml.Node]] = root.value
    return pairs


def _problem(path: str, line: int, key: str, value: object) -> Problem | None:
    """Returns what is wrong with one key and its value; None if nothing is."""
    if key not in FIELDS:
        close = nearest(key, FIELDS)
        fix = f"write {close}" if close else f"use one of {', '.join(sorted(FIELDS))}"
        return Problem("kubernetes-values", f"{path}:{line}: there is no key {short_repr(key)}.", fix=fix)
    expected = FIELDS[key]
    fits = isinstance(value, _TYPES[expected]) and not (expected == _TEXT and isinstance(value, bool))
    if not fits:
        why = f"it is {short_repr(value)}; expected: {expected}"
        return Problem(
            "kubernetes-values", f"{path}:{line}: {key} has a value of another kind.", why, "correct that line"
        )
    return None


def _values(values: Mapping[str, Any]) -> ManifestValues:
    """Sorts the values of a file by where they belong: in the run, in the container or in the pod."""
    own: dict[str, Any] = {}
    for name in (*OURS, *METADATA):
        if name not in values:
            continue
        value = values[name]
        # Quantities and labels are text in Kubernetes, and YAML reads `1` and `true` as something else.
        if FIELDS[name] == _MAPPING:
            own[name] = {str(key): _text(item) for key, item in value.items()}
        else:
            own[name] = _text(value)
    container = {name: values[name] for name in CONTAINER if name in values}
    pod = {_OTHER_NAME.get(name, name): values[name] for name in POD if name in values}
    return ManifestValues(**own, container=container, pod=pod)


def _text(value: object) -> str:
    """Returns a value as YAML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
