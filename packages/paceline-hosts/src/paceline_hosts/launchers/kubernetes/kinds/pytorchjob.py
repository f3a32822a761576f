"""Kubeflow's PyTorchJob (kubeflow.org/v1): one master, and workers. It cannot restart without counting after exit code 75."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_hosts.launchers.kubernetes.kinds.kind import Resource, WorkloadKind
from paceline_hosts.launchers.kubernetes.pod import KEEP_S, Manifest, pod_template
from paceline_hosts.launchers.kubernetes.run import PodRun


class PyTorchJob(WorkloadKind):
    """A PyTorchJob, whose operator sets RANK and WORLD_SIZE, which count pods, and creates a service for each pod."""

    name = "pytorchjob"
    kind = "PyTorchJob"
    resource = Resource("kubeflow.org", "v1", "pytorchjobs")
    container = "pytorch"
    succeeded = "Succeeded"

    def spec(self, run: PodRun) -> Manifest:
        """Returns the specification of the PyTorchJob."""
        # The operator restarts pods by its own policy, and counts the restarts of all containers together. It fails the job
        # when their number reaches the limit. So the limit is one more than the number of restarts that are allowed.
        restart = "OnFailure" if run.max_restarts else "Never"
        limit = run.max_restarts * run.nodes + 1 if run.max_restarts else 0
        template = pod_template(run, container=self.container, restart="")
        replicas: Manifest = {"Master": {"replicas": 1, "restartPolicy": restart, "template": template}}
        if run.nodes > 1:
            replicas["Worker"] = {"replicas": run.nodes - 1, "restartPolicy": restart, "template": template}
        policy = {"backoffLimit": limit, "cleanPodPolicy": "Running", "ttlSecondsAfterFinished": KEEP_S}
        return {"nprocPerNode": str(run.procs), "runPolicy": policy, "pytorchReplicaSpecs": replicas}

    def node_of(self, pod: Mapping[str, Any]) -> int:
        """Returns the number of the node: the master is node 0, and worker N is node N + 1."""
        labels = pod["metadata"].get("labels", {})
        index = int(labels.get("training.kubeflow.org/replica-index", 0))
        is_worker = str(labels.get("training.kubeflow.org/replica-type", "")).lower() == "worker"
        return index + 1 if is_worker else index
