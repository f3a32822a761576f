"""Manifests of the pod that runs one node, and of the objects that every kind of run has beside it. All functions are pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline_hosts.launchers.kubernetes.run import FIRST_WORDS, SCRIPT_FOLDER, TLS_FOLDER, PodRun

Manifest = dict[str, Any]
MANAGED_BY = "app.kubernetes.io/managed-by"
INSTANCE = "app.kubernetes.io/instance"
QUEUE = "kueue.x-k8s.io/queue-name"
CONTAINER = "node"
KEEP_S = 86_400  # how long the cluster keeps a run that has ended and that nobody deletes
_AFTER_GRACE_S = 15  # for the launcher to tell how it ended


def labels(run: PodRun) -> dict[str, str]:
    """Returns the labels by which the objects and pods of a run are found."""
    return {"app.kubernetes.io/name": "paceline", INSTANCE: run.name, MANAGED_BY: "paceline"}


def selector(run: PodRun) -> str:
    """Returns the label selector for the pods of a run."""
    return f"{INSTANCE}={run.name},{MANAGED_BY}=paceline"


def metadata(run: PodRun) -> Manifest:
    """Returns the name, namespace and labels of an object of a run."""
    namespace = {"namespace": run.namespace} if run.namespace else {}
    return {"name": run.name, **namespace, "labels": labels(run)}


def main_metadata(run: PodRun) -> Manifest:
    """Returns the metadata of the object that creates the pods, where Kueue looks for the name of its queue."""
    described = metadata(run)
    if run.queue:
        described["labels"] = {**described["labels"], QUEUE: run.queue}
    return described


def torchrun_variables(run: PodRun, address: str) -> list[Manifest]:
    """Returns torchrun's variables, from which `paceline launch` in the pod reads the number of its node.

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
    """Returns the template of the pods.

    Args:
        run: the run.
        env: variables that the kind of the run needs, besides the run's own.
        container: the name of the only container.
        restart: the restart policy of the pod; "" leaves it to the controller.
        subdomain: the headless service through which pods find each other; "" if the controller creates one.
    """
    values = run.values
    devices = {values.gpu: str(run.gpus)} if run.gpus else {}
    amounts = {**devices, **values.resources}
    own = values.container
    # By default /dev/shm of a container has 64 MiB. When it is full, the workers of a DataLoader die with a bus error.
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
        # After a failure the cluster copies the end of the log into the pod's status, where `Follower` reads it.
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
    """Returns the specification of a Job with one numbered pod for each node.

    Args:
        run: the run.
        template: the template of its pods.
        action: what the Job does when a pod has saved and ended (exit code 75), or when the cluster has removed it.
        backoff_limit: how many pods may fail.
    """
    has_saved = {"containerName": CONTAINER, "operator": "In", "values": [75]}
    return {
        "completionMode": "Indexed",
        "completions": run.nodes,
        "parallelism": run.nodes,
        "backoffLimit": backoff_limit,
        "podFailurePolicy": {
            "rules": [
                {"action": action, "onExitCodes": has_saved},
                {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }


def secret(run: PodRun) -> Manifest:
    """Returns the Secret with the variables that only the pods may read."""
    content = dict(run.secrets)
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata(run), "type": "Opaque", "stringData": content}


def tls_name(run: PodRun) -> str:
    """Returns the name of the Secret with the key and the certificate.

    It is a Secret of its own, because all entries of the other one become variables of the processes.
    """
    return f"{run.name}-tls"


def tls_secret(run: PodRun) -> Manifest:
    """Returns the Secret with the files with which the launchers encrypt."""
    about = {**metadata(run), "name": tls_name(run)}
    content = dict(run.tls)
    return {"apiVersion": "v1", "kind": "Secret", "metadata": about, "type": "kubernetes.io/tls", "stringData": content}


def config_map(run: PodRun) -> Manifest:
    """Returns the ConfigMap that contains the script."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(run), "data": {run.script_name: run.script}}


def headless_service(run: PodRun) -> Manifest:
    """Returns the Service that gives each pod a host name, also before the pod is ready."""
    spec: Mapping[str, Any] = {
        "clusterIP": "None",
        "selector": {INSTANCE: run.name, MANAGED_BY: "paceline"},
        "publishNotReadyAddresses": True,
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(run), "spec": dict(spec)}
