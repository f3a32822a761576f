"""JobSet (jobset.x-k8s.io): one Indexed Job. If one of its pods fails, the controller starts all of them again."""

from __future__ import annotations

from paceline_hosts.launchers.kubernetes.kinds.kind import Resource, WorkloadKind
from paceline_hosts.launchers.kubernetes.pod import (
    KEEP_S,
    Manifest,
    indexed_job,
    pod_template,
    torchrun_variables,
)
from paceline_hosts.launchers.kubernetes.run import PodRun


def jobset_spec(run: PodRun, template: Manifest, job_labels: dict[str, str] | None = None) -> Manifest:
    """Returns the specification of a JobSet, which the runtime of a TrainJob contains too.

    Args:
        run: the run.
        template: the template of its pods.
        job_labels: labels of the Job; None for none.
    """
    # A pod that fails ends its Job, and a Job that fails restarts the set. Pods that have saved and ended, or that the
    # cluster has evicted, match the failure policy of the Job (`pod.indexed_job`): such a restart is not counted.
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


class JobSet(WorkloadKind):
    """A JobSet, whose controller creates the headless service."""

    name = "jobset"
    kind = "JobSet"
    resource = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets")
    succeeded = "Completed"

    def spec(self, run: PodRun) -> Manifest:
        """Returns the specification of the JobSet."""
        template = pod_template(run, torchrun_variables(run, f"{run.name}-node-0-0.{run.name}"))
        return {**jobset_spec(run, template), "ttlSecondsAfterFinished": KEEP_S}
