"""An Indexed Job (batch/v1) and a headless service, for clusters that have nothing else."""

from __future__ import annotations

from paceline.launch.launchers.kubernetes.kinds.kind import SERVICES, Kind, Resource
from paceline.launch.launchers.kubernetes.pod import (
    KEEP_S,
    Manifest,
    headless_service,
    indexed_job,
    pod_template,
    torchrun_variables,
)
from paceline.launch.launchers.kubernetes.run import PodRun


class IndexedJob(Kind):
    """A Job. Its controller replaces the pods that fail; the others leave by themselves when they lose one."""

    name = "job"
    kind = "Job"
    resource = Resource("batch", "v1", "jobs")

    def spec(self, run: PodRun) -> Manifest:
        """The Job's."""
        template = pod_template(run, torchrun_variables(run, f"{run.name}-0.{run.name}"), subdomain=run.name)
        # One restart of the run is a failure of each of its pods.
        spec = indexed_job(run, template, "Ignore", run.max_restarts * run.nodes)
        return {**spec, "ttlSecondsAfterFinished": KEEP_S}

    def beside(self, run: PodRun) -> list[tuple[Resource, Manifest]]:
        """The Secret, the script and the service."""
        return [*super().beside(run), (SERVICES, headless_service(run))]


JOB = IndexedJob()
