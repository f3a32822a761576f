"""Kubeflow's TrainJob (trainer.kubeflow.org): it takes nodes and processes, and a TrainingRuntime has all the rest.

The runtime is made for this run, as those that administrators offer leave failures, /dev/shm and volumes to themselves.
"""

from __future__ import annotations

from paceline.launch.launchers.kubernetes.kinds.jobset import jobset_spec
from paceline.launch.launchers.kubernetes.kinds.kind import Kind, Resource
from paceline.launch.launchers.kubernetes.pod import Manifest, metadata, pod_template
from paceline.launch.launchers.kubernetes.run import PodRun

RUNTIMES = Resource("trainer.kubeflow.org", "v1alpha1", "trainingruntimes")


class TrainJob(Kind):
    """A TrainJob, whose controller makes a JobSet and gives its pods torchrun's variables."""

    name = "trainjob"
    kind = "TrainJob"
    resource = Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs")

    def spec(self, run: PodRun) -> Manifest:
        """The TrainJob's."""
        return {
            "runtimeRef": {"apiGroup": self.resource.group, "kind": "TrainingRuntime", "name": run.name},
            "trainer": {"numNodes": run.nodes, "numProcPerNode": run.procs},
        }

    def before(self, run: PodRun) -> list[tuple[Resource, Manifest]]:
        """The runtime."""
        about = metadata(run)
        about["labels"] = {**about["labels"], "trainer.kubeflow.org/framework": "torch"}
        step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        runtime = {
            "apiVersion": RUNTIMES.api_version,
            "kind": "TrainingRuntime",
            "metadata": about,
            "spec": {
                "mlPolicy": {"numNodes": run.nodes, "torch": {}},
                "template": {"spec": jobset_spec(run, pod_template(run), step)},
            },
        }
        return [(RUNTIMES, runtime)]


TRAINJOB = TrainJob()
