"""An Indexed Job (batch/v1) and a headless service, for clusters that have nothing else."""

from __future__ import annotations

from paceline_hosts.launchers.kubernetes.kinds.kind import SERVICES, Resource, WorkloadKind
from paceline_hosts.launchers.kubernetes.pod import (
    KEEP_S,
    Manifest,
    headless_service,
    indexed_job,
    pod_template,
    torchrun_variables,
)
from paceline_hosts.launchers.kubernetes.run import PodRun


class IndexedJob(WorkloadKind):
    """A Job, whose controller replaces the pods that fail. The other pods notice the loss of one, and end by themselves."""

    name = "job"
    kind = "Job"
    resource = Resource("batch", "v1", "jobs")

    def spec(self, run: PodRun) -> Manifest:
        """Returns the specification of the Job."""
        template = pod_template(run, torchrun_variables(run, f"{run.name}-0.{run.name}"), subdomain=run.name)
        # In one restart of the run each of its pods fails once, and the Job counts the failures of all pods.
        spec = indexed_job(run, template, "Ignore", run.max_restarts * run.nodes)
        return {**spec, "ttlSecondsAfterFinished": KEEP_S}

    def beside(self, run: PodRun) -> list[tuple[Resource, Manifest]]:
        """Returns the Secret, the script and the service."""
        return [*super().beside(run), (SERVICES, headless_service(run))]
