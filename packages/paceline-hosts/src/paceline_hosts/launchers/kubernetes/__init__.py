"""A cluster of Kubernetes: one pod for each node, in which `paceline launch` starts the processes.

Job --pod_run--> PodRun --Kind.main, before, beside--> manifests       pure (run.py, pod.py, kinds/), but for two files
    --check--> what is wrong, all at once                              checks.py
    --Submission.make--> objects in the cluster --Follower--> lines, the end, the exit code      submission.py, follow.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.base.terminal import say
from paceline.launch.job import Job
from paceline.launch.launcher import Hosts, Rendered
from paceline.launch.make_job import shown_ranks
from paceline_hosts.assignment import assignment_of

if TYPE_CHECKING:
    from paceline_hosts.launchers.kubernetes.submission import Submission


class KubernetesLauncher:
    """Starts a job in pods."""

    name = "kubernetes"
    hosts: Hosts = "chosen"

    def available(self) -> str:
        """Returns "": a missing client is only reported when it is needed, and `--dry-run` does not need it."""
        return ""

    def render(self, job: Job) -> Rendered:
        """Returns the manifests. It reads the values file and the script, and makes no request to the cluster.

        Raises:
            ConfigError: those of `pod_run`.
        """
        from paceline_hosts.launchers.kubernetes.document import document
        from paceline_hosts.launchers.kubernetes.kinds import KINDS
        from paceline_hosts.launchers.kubernetes.run import pod_run

        run = pod_run(job)
        kind = KINDS.get(job.cluster.kind, KINDS["jobset"])
        notices: tuple[str, ...] = ()
        if not run.gpus and not assignment_of(job).settings.run.cpu:
            notices = (
                f"no GPU is requested; `--gpus {job.procs}` requests {job.procs} for each pod, `--cpu` says that none "
                "is needed.",
            )
        return Rendered(job, job.target.command, document=document(run, kind), notices=notices)

    def submit(self, rendered: Rendered) -> Submission:
        """Checks the run against the cluster, then creates its objects.

        Raises:
            ConfigError: those of `pod_run`.
            LaunchError: those of `Cluster.open`, `kind_of`, `check` and `Submission.make`.
        """
        from paceline.base.errors import LaunchError
        from paceline_hosts.launchers.kubernetes import checks
        from paceline_hosts.launchers.kubernetes.client import Cluster
        from paceline_hosts.launchers.kubernetes.refusals import as_error
        from paceline_hosts.launchers.kubernetes.run import pod_run
        from paceline_hosts.launchers.kubernetes.submission import Submission

        settings = rendered.job.cluster
        run = pod_run(rendered.job)
        # The lines of a run are only seen while somebody reads them from the cluster, so this command does so by default.
        wait = assignment_of(rendered.job).settings.launch.wait is not False
        cluster = Cluster.open(settings.kube_context or "", settings.namespace or "")
        try:
            with as_error(cluster.namespace):
                kind = checks.kind_of(cluster, settings.kind)
                notices = checks.check(cluster, run, kind, wait)
        except LaunchError:
            cluster.close()
            raise
        for notice in filter(None, [run.notice, *notices]):
            say(notice)
        submission = Submission(cluster, run, kind, wait, _shown_nodes(rendered.job))
        submission.make()
        return submission


def _shown_nodes(job: Job) -> frozenset[int] | None:
    """Returns the nodes with a rank whose output is shown; None for all."""
    ranks = shown_ranks(assignment_of(job).settings, job.procs)
    if ranks is None:
        return None
    return frozenset(rank // job.procs for rank in ranks)


LAUNCHER = KubernetesLauncher()
