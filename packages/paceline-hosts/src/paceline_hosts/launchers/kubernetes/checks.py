"""Checks a run against the cluster before anything is created there, and reports all problems at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.base.errors import LaunchError, Problem
from paceline_hosts.launchers.kubernetes.client import Cluster
from paceline_hosts.launchers.kubernetes.kinds import KINDS
from paceline_hosts.launchers.kubernetes.kinds.kind import PODS, Resource, WorkloadKind
from paceline_hosts.launchers.kubernetes.refusals import Refusal, may_not, namespace_missing
from paceline_hosts.launchers.kubernetes.run import PodRun

_QUEUES = Resource("kueue.x-k8s.io", "v1beta1", "localqueues")
_SHOWN_NODES = 5


def kind_of(cluster: Cluster, wanted: str) -> WorkloadKind:
    """Returns the kind that the user wants, or the first one that the cluster has.

    Args:
        cluster: the cluster.
        wanted: a name of `KINDS`, or "auto".

    Raises:
        LaunchError: `kubernetes-kind`, and those of the API.
    """
    if wanted == "auto":
        # `KINDS` begins with the better ones. Every cluster has the last one, an Indexed Job, so the cluster is not asked.
        for kind in KINDS.values():
            if kind.name == "job" or cluster.has(kind.resource):
                return kind
    kind = KINDS[wanted]
    if not cluster.has(kind.resource):
        fix = "leave --kind out"
        others = [other.name for other in KINDS.values() if other is not kind and cluster.has(other.resource)]
        if others:
            fix += f", or say --kind {others[0]}, which the cluster has"
        raise LaunchError(
            "kubernetes-kind",
            f"the cluster has no {kind.kind} ({kind.resource.api_version}).",
            why=f"--kind {wanted}",
            fix=fix,
        )
    return kind


def check(cluster: Cluster, run: PodRun, kind: WorkloadKind, wait: bool) -> list[str]:
    """Finds what would keep the run from starting. Returns notices for the user.

    Args:
        cluster: the cluster.
        run: what to run.
        kind: the kind of the run's object.
        wait: whether the run is followed to its end, which needs more permissions.

    Raises:
        LaunchError: `kubernetes-namespace`, `kubernetes-forbidden`, `kubernetes-queue`, `kubernetes-gpus`, all at once.
    """
    # Without the namespace every other check would fail too.
    missing = _namespace(cluster)
    if missing is not None:
        raise LaunchError.of([missing])
    notices: list[str] = []
    problems = [_permissions(cluster, run, kind, wait), _queue(cluster, run), _devices(cluster, run, notices)]
    wrong = [problem for problem in problems if problem is not None]
    if wrong:
        raise LaunchError.of(wrong)
    return notices


def _namespace(cluster: Cluster) -> Problem | None:
    try:
        cluster.get(f"/api/v1/namespaces/{cluster.namespace}")
    except Refusal as refusal:
        if refusal.status == 404:
            return namespace_missing(cluster.namespace, cluster.source)
        # A user who may not read namespaces learns whether it exists when the first object is created.
        if refusal.status != 403:
            raise
    return None


def _permissions(cluster: Cluster, run: PodRun, kind: WorkloadKind, wait: bool) -> Problem | None:
    """Returns which permissions for this run the user lacks; None if there are none."""
    others = [*kind.before(run), *kind.beside(run)]
    objects = [kind.resource, *(resource for resource, _ in others)]
    needed = []  # verb, resource, and a part of the object such as its log
    for resource in objects:
        needed += [("create", resource, ""), ("delete", resource, "")]
    if wait:
        needed += [("list", kind.resource, ""), ("watch", kind.resource, "")]
        needed += [("list", PODS, ""), ("watch", PODS, ""), ("get", PODS, "log")]
    lacking = []
    for verb, resource, subresource in needed:
        if not cluster.may(verb, resource, subresource):
            name = f"{resource.plural}/{subresource}" if subresource else resource.plural
            lacking.append((verb, name, resource.group))
    if not lacking:
        return None
    return may_not(lacking, cluster.namespace, "the API server was asked (SelfSubjectAccessReview)")


def _queue(cluster: Cluster, run: PodRun) -> Problem | None:
    """Returns the problem if Kueue's queue does not exist; None if it does, or if the user may not look."""
    if not run.queue:
        return None
    try:
        cluster.get(_QUEUES.path(cluster.namespace, run.queue))
    except Refusal as refusal:
        if refusal.status == 403:
            return None
        if refusal.status != 404:
            raise
        what = f"there is no queue {run.queue!r} in namespace {cluster.namespace}."
        return Problem("kubernetes-queue", what, f"--queue {run.queue}; {_queues(cluster)}", "name one that is there")
    return None


def _queues(cluster: Cluster) -> str:
    """Returns the names of the existing queues, for a message."""
    if not cluster.has(_QUEUES):
        return "the cluster has no Kueue, whose queues these are"
    names = [item["metadata"]["name"] for item in cluster.get(_QUEUES.path(cluster.namespace))["items"]]
    return f"there are: {', '.join(names)}" if names else "there is none"


def _devices(cluster: Cluster, run: PodRun, notices: list[str]) -> Problem | None:
    """Returns the problem if no node on which the pods may run has as many devices as one pod needs."""
    if not run.gpus:
        return None
    try:
        nodes = cluster.get("/api/v1/nodes")["items"]
    except Refusal as refusal:
        if refusal.status == 403:
            return None
        raise
    wanted = run.values.pod.get("nodeSelector", {})
    usable = [node for node in nodes if _has_labels(node, wanted)]
    counts = {node["metadata"]["name"]: _allocatable(node, run.values.gpu) for node in usable}
    most = max(counts.values(), default=0)
    if most >= run.gpus:
        return None
    selected = f" with the labels {dict(wanted)}" if wanted else ""
    if most == 0:
        # A cluster that grows by itself may have none yet.
        notices.append(f"no node{selected} has {run.values.gpu} now; the pods wait until one has {run.gpus}.")
        return None
    largest = sorted(counts, key=lambda name: -counts[name])[:_SHOWN_NODES]
    listed = ", ".join(f"{name} has {counts[name]}" for name in largest)
    what = f"no node{selected} has {run.gpus} {run.values.gpu}, as each pod asks for."
    fix = f"say --gpus {most} or less, and more --nodes"
    return Problem("kubernetes-gpus", what, f"{listed}; nodes in all: {len(usable)}", fix)


def _has_labels(node: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    labels = node["metadata"].get("labels") or {}
    return all(labels.get(name) == value for name, value in wanted.items())


def _allocatable(node: Mapping[str, Any], resource: str) -> int:
    allocatable = node.get("status", {}).get("allocatable") or {}
    amount = str(allocatable.get(resource, "0"))
    return int(amount) if amount.isdecimal() else 0
