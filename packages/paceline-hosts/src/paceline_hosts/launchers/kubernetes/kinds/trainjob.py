"""Kubeflow's TrainJob (trainer.kubeflow.org): it has the numbers of nodes and processes; a TrainingRuntime has the rest.

The launcher creates a runtime for each run, because the runtimes of an administrator decide about restarts, /dev/shm and
volumes themselves.
"""

from __future__ import annotations

from paceline_hosts.launchers.kubernetes.kinds.jobset import jobset_spec
from paceline_hosts.launchers.kubernetes.kinds.kind import Resource, WorkloadKind
from paceline_hosts.launchers.kubernetes.pod import Manifest, metadata, pod_template
from paceline_hosts.launchers.kubernetes.run import PodRun

RUNTIMES = Resource("trainer.kubeflow.org", "v1alpha1", "trainingruntimes")


class TrainJob(WorkloadKind):
    """A TrainJob, whose controller creates a JobSet and sets the variables of torchrun in its pods."""

    name = "trainjob"
    kind = "TrainJob"
    resource = Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs")

    def spec(self, run: PodRun) -> Manifest:
        """Returns the specification of the TrainJob."""
        return {
            "runtimeRef": {"apiGroup": self.resource.group, "kind": "TrainingRuntime", "name": run.name},
            "trainer": {"numNodes": run.nodes, "numProcPerNode": run.procs},
        }

    def before(self, run: PodRun) -> list[tuple[Resource, Manifest]]:
        """Returns the runtime."""
        runtime_metadata = metadata(run)
        runtime_metadata["labels"] = {**runtime_metadata["labels"], "trainer.kubeflow.org/framework": "torch"}
        step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        runtime = {
            "apiVersion": RUNTIMES.api_version,
            "kind": "TrainingRuntime",
            "metadata": runtime_metadata,
            "spec": {
                "mlPolicy": {"numNodes": run.nodes, "torch": {}},
                "template": {"spec": jobset_spec(run, pod_template(run), step)},
            },
        }
        return [(RUNTIMES, runtime)]
