"""The pod that runs one node, and the objects that every kind of run has beside it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.launch.launchers.kubernetes.run import FIRST_WORDS, SCRIPT_FOLDER, TLS_FOLDER, PodRun

Manifest = dict[str, Any]
MANAGED_BY = "app.kubernetes.io/managed-by"
INSTANCE = "app.kubernetes.io/instance"
QUEUE = "kueue.x-k8s.io/queue-name"
CONTAINER = "node"
KEEP_S = 86_400  # how long the cluster keeps a run that has ended and that nobody deletes
_AFTER_GRACE_S = 15  # for the launcher to tell how it ended


def labels(run: PodRun) -> dict[str, str]:
    """By which the objects and pods of a run are found."""
    return {"app.kubernetes.io/name": "paceline", INSTANCE: run.name, MANAGED_BY: "paceline"}


def selector(run: PodRun) -> str:
    """The pods of a run."""
    return f"{INSTANCE}={run.name},{MANAGED_BY}=paceline"


def metadata(run: PodRun) -> Manifest:
    """Name, namespace and labels of an object of a run."""
    namespace = {"namespace": run.namespace} if run.namespace else {}
    return {"name": run.name, **namespace, "labels": labels(run)}


def main_metadata(run: PodRun) -> Manifest:
    """The same of the object that makes the pods: Kueue looks there for its queue."""
    described = metadata(run)
    if run.queue:
        described["labels"] = {**described["labels"], QUEUE: run.queue}
    return described


def torchrun_variables(run: PodRun, address: str) -> list[Manifest]:
    """torchrun's variables, from which `paceline launch` in the pod learns its place.

    Args:
        run: the run.
        address: the host name of pod 0.
    """
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        {"name": "PET_NNODES", "value": str(run.nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(run.procs)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": "PET_MASTER_ADDR", "value": address},
        {"name": "PET_MASTER_PORT", "value": str(run.port)},
    ]


def pod_template(
    run: PodRun,
    env: Sequence[Manifest] = (),
    *,
    container: str = CONTAINER,
    restart: str = "Never",
    subdomain: str = "",
) -> Manifest:
    """The pods' template.

    Args:
        run: the run.
        env: variables that its kind needs, on top of the run's own.
        container: name of the one container.
        restart: when a container is started again in its pod; "" leaves that to the controller.
        subdomain: the headless service by which pods know each other; "" where the controller sees to it.
    """
    values = run.values
    devices = {values.gpu: str(run.gpus)} if run.gpus else {}
    amounts = {**devices, **values.resources}
    own = values.container
    # A container has 64 MiB otherwise, and the workers of a DataLoader end with a bus error when it is full.
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": values.shm}}]
    if run.script:
        mounts.append({"name": "script", "mountPath": SCRIPT_FOLDER})
        volumes.append({"name": "script", "configMap": {"name": run.name}})
    if run.tls:
        mounts.append({"name": "tls", "mountPath": TLS_FOLDER})
        volumes.append({"name": "tls", "secret": {"secretName": tls_name(run)}})
    variables = [{"name": name, "value": value} for name, value in run.env.items()]
    described: Manifest = {
        **own,
        "name": container,
        "image": run.image,
        "command": ["python3", "-c", FIRST_WORDS],
        "args": list(run.words),
        "env": [*variables, *env, *own.get("env", ())],
        "envFrom": [{"secretRef": {"name": run.name}}, *own.get("envFrom", ())],
        "volumeMounts": [*mounts, *own.get("volumeMounts", ())],
        # What the launcher says last is then found in the pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if amounts:
        described["resources"] = {"limits": amounts, "requests": dict(amounts)}
    spec: Manifest = {
        **values.pod,
        "containers": [described],
        "volumes": [*volumes, *values.pod.get("volumes", ())],
        "terminationGracePeriodSeconds": math.ceil(run.grace_s) + _AFTER_GRACE_S,
    }
    if restart:
        spec["restartPolicy"] = restart
    if subdomain:
        spec["subdomain"] = subdomain
    about: Manifest = {"labels": {**values.labels, **labels(run)}}
    if values.annotations:
        about["annotations"] = dict(values.annotations)
    return {"metadata": about, "spec": spec}


def indexed_job(run: PodRun, template: Manifest, action: str, backoff_limit: int) -> Manifest:
    """Specification of a Job with one numbered pod for each node.

    Args:
        run: the run.
        template: its pods.
        action: what becomes of the Job when a pod has saved and ended (75), or was taken away by the cluster.
        backoff_limit: how many pods may fail.
    """
    has_left = {"containerName": CONTAINER, "operator": "In", "values": [75]}
    return {
        "completionMode": "Indexed",
        "completions": run.nodes,
        "parallelism": run.nodes,
        "backoffLimit": backoff_limit,
        "podFailurePolicy": {
            "rules": [
                {"action": action, "onExitCodes": has_left},
                {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }


def secret(run: PodRun) -> Manifest:
    """The Secret, with what nobody else is to read."""
    content = dict(run.secrets)
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata(run), "type": "Opaque", "stringData": content}


def tls_name(run: PodRun) -> str:
    """The Secret with key and certificate has a name of its own: all of the other one becomes variables of the processes."""
    return f"{run.name}-tls"


def tls_secret(run: PodRun) -> Manifest:
    """The Secret with the files by which the launchers encrypt."""
    about = {**metadata(run), "name": tls_name(run)}
    content = dict(run.tls)
    return {"apiVersion": "v1", "kind": "Secret", "metadata": about, "type": "kubernetes.io/tls", "stringData": content}


def config_map(run: PodRun) -> Manifest:
    """The ConfigMap that carries the script."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(run), "data": {run.script_name: run.script}}


def headless_service(run: PodRun) -> Manifest:
    """The Service that gives each pod a name before it is ready."""
    spec: Mapping[str, Any] = {
        "clusterIP": "None",
        "selector": {INSTANCE: run.name, MANAGED_BY: "paceline"},
        "publishNotReadyAddresses": True,
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(run), "spec": dict(spec)}
