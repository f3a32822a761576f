"""JobSet (jobset.x-k8s.io): one Indexed Job; when one of its pods fails, all of them begin anew."""

from __future__ import annotations

from paceline.launch.launchers.kubernetes.kinds.kind import Kind, Resource
from paceline.launch.launchers.kubernetes.pod import (
    KEEP_S,
    Manifest,
    indexed_job,
    pod_template,
    torchrun_variables,
)
from paceline.launch.launchers.kubernetes.run import PodRun


def jobset_spec(run: PodRun, template: Manifest, job_labels: dict[str, str] | None = None) -> Manifest:
    """Specification of a JobSet; a TrainJob's runtime holds one too."""
    # A pod that fails ends its Job, and a Job that fails restarts the set. The one reason that is told apart is the
    # Job's own failure policy, which here means "has saved and ended" or "was taken away", and does not count.
    job: Manifest = {"spec": indexed_job(run, template, "FailJob", 0)}
    if job_labels:
        job["metadata"] = {"labels": job_labels}
    not_counted = {
        "name": "hasSavedOrWasTakenAway",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "network": {"enableDNSHostnames": True, "subdomain": run.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": run.max_restarts, "rules": [not_counted]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": job}],
    }


class JobSet(Kind):
    """A JobSet, whose controller makes the headless service."""

    name = "jobset"
    kind = "JobSet"
    resource = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets")
    succeeded = "Completed"

    def spec(self, run: PodRun) -> Manifest:
        """The JobSet's."""
        template = pod_template(run, torchrun_variables(run, f"{run.name}-node-0-0.{run.name}"))
        return {**jobset_spec(run, template), "ttlSecondsAfterFinished": KEEP_S}


JOBSET = JobSet()
