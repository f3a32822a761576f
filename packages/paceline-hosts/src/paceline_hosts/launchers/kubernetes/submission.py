"""`Submission` creates the objects of a run in a cluster, follows the run to its end, and deletes them again."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.base.errors import LaunchError, Problem
from paceline.base.exits import PREEMPTED
from paceline.base.terminal import say
from paceline.launch.launcher import Outcome
from paceline.launch.processes.output import say_error
from paceline.launch.processes.signals import Signals
from paceline_hosts.launchers.kubernetes.client import Cluster
from paceline_hosts.launchers.kubernetes.follow import Follower
from paceline_hosts.launchers.kubernetes.kinds.kind import PODS, Resource, WorkloadKind
from paceline_hosts.launchers.kubernetes.refusals import Refusal, as_error
from paceline_hosts.launchers.kubernetes.run import PodRun

_TICK_S = 0.2
_LATE_S = 45.0  # how much longer than its grace period a pod may take to end


class Submission:
    """A run in a cluster.

    Args:
        cluster: the cluster in which it runs.
        run: what to run.
        kind: the kind of the run's object.
        wait: whether to follow the run to its end.
        shown: numbers of the nodes whose lines are shown; None for all.
    """

    def __init__(
        self, cluster: Cluster, run: PodRun, kind: WorkloadKind, wait: bool, shown: frozenset[int] | None = None
    ) -> None:
        self._cluster = cluster
        self._run = run
        self._kind = kind
        self._wait = wait
        self._shown = shown
        self._objects: list[tuple[Resource, str]] = []  # what was created, in order
        self._main: dict[str, Any] = {}
        self._signals = Signals(lambda number: None)

    def make(self) -> None:
        """Creates all objects, or none of them.

        Raises:
            LaunchError: `kubernetes-manifest`, `kubernetes-forbidden`, `kubernetes-conflict` and others of the API.
        """
        # From here on Ctrl-C is only recorded, so that it cannot interrupt this halfway and leave objects in the cluster.
        self._signals.enter()
        try:
            with as_error(self._cluster.namespace):
                self._make()
        except BaseException:
            self._take_away()
            self._cluster.close()
            self._signals.leave()
            raise

    def _make(self) -> None:
        for resource, manifest in self._kind.before(self._run):
            self._create(resource, manifest)
        main = self._create(self._kind.resource, self._kind.main(self._run))
        self._main = main
        # The cluster deletes the other objects together with the run's object, whoever deletes that.
        owner = {
            "apiVersion": main["apiVersion"],
            "kind": main["kind"],
            "name": main["metadata"]["name"],
            "uid": main["metadata"]["uid"],
        }
        for resource, manifest in self._kind.beside(self._run):
            owned = {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}}
            self._create(resource, owned)

    def _create(self, resource: Resource, manifest: Mapping[str, Any]) -> dict[str, Any]:
        # The object is recorded before the request: if the answer is lost, it may exist nevertheless, and must be deleted.
        self._objects.append((resource, manifest["metadata"]["name"]))
        try:
            return self._cluster.create(resource, manifest)
        except Refusal:
            self._objects.pop()  # an object of this name that exists belongs to somebody else
            raise

    def wait(self) -> Outcome:
        """Follows the run to its end and deletes its objects. Without `wait` it only prints how to delete them.

        Raises:
            LaunchError: `kubernetes-image`, `kubernetes-pod`, `kubernetes-lost`.
        """
        namespace = self._cluster.namespace
        pods = f"{self._run.nodes} pod{'s' * (self._run.nodes > 1)}"
        say(f"{self._kind.kind} {self._run.name} in namespace {namespace}: {pods}")
        if not self._wait:
            self._signals.leave()
            self._cluster.close()
            objects = " ".join(f"{resource.plural}/{name}" for resource, name in self._lasting())
            say(f"`kubectl delete {objects} -n {namespace}` ends it and takes it away")
            return Outcome(0)
        follower = Follower(self._cluster, self._run, self._kind, self._main, self._shown)
        lost = False
        try:
            with as_error(namespace):
                while not (follower.state.ended or follower.deleted or self._signals.ending):
                    follower.next(_TICK_S)
                if self._signals.ending:
                    return self._asked_to_end(follower)
                follower.drain()
                return self._outcome(follower)
        except LaunchError as error:
            lost = error.code == "kubernetes-lost"
            raise
        finally:
            # A run that cannot be reached is left to go on: this command does not know what has become of it.
            if not lost:
                self._take_away()
            self._cluster.close()
            self._signals.leave()

    def _lasting(self) -> Sequence[tuple[Resource, str]]:
        """Returns the objects that the cluster does not delete together with another one."""
        owned = {resource.plural for resource, _ in self._kind.beside(self._run)}
        return [(resource, name) for resource, name in self._objects if resource.plural not in owned]

    def _outcome(self, follower: Follower) -> Outcome:
        """Returns the outcome of a run that has ended by itself.

        Raises:
            LaunchError: `kubernetes-image`, if it ended because of its image.
        """
        if follower.state.ended and not follower.state.failed:
            return Outcome(0)
        follower.check_started()
        code = follower.exit_code()
        if code == PREEMPTED:
            say("the pods have saved and ended, and the cluster does not start them again")
            return Outcome(PREEMPTED)
        what = f"the run {self._run.name} has failed."
        fix = "correct the error that is shown above"
        if follower.deleted and not follower.state.ended:
            what = f"somebody has deleted {self._kind.resource.plural}/{self._run.name}."
            fix = "start the command again; with checkpoints the run goes on from the newest"
        problem = Problem("kubernetes-failed", what, follower.why(), fix)
        say_error(problem)
        return Outcome(code)

    def _asked_to_end(self, follower: Follower) -> Outcome:
        """Ends the run because of a signal.

        Deleting the run's object gives the pods their grace period to save. A second signal ends that.
        """
        (asked, *_) = self._signals.ending
        say(f"the pods have {self._run.grace_s:g} s to save (--grace-s); Ctrl-C again ends them at once")
        self._cluster.delete(self._kind.resource, self._run.name)
        deadline = time.monotonic() + self._run.grace_s + _LATE_S
        while follower.present and len(self._signals.ending) == 1 and time.monotonic() < deadline:
            follower.next(_TICK_S)
        if len(self._signals.ending) > 1:
            for uid in follower.present:
                self._cluster.delete(PODS, follower.pods[uid]["metadata"]["name"], grace_s=0)
        else:
            follower.drain()
        saved = follower.all_saved()
        if saved:
            say("all pods have saved and ended, as they were asked to")
        # A scheduler starts a run again that ended with `PREEMPTED`. A user who types Ctrl-C does not want that.
        if saved and asked != signal.SIGINT:
            return Outcome(PREEMPTED)
        return Outcome(128 + asked)

    def _take_away(self) -> None:
        """Deletes the objects, the last one first. If some cannot be deleted, it prints the command that does so."""
        left = []
        for resource, name in reversed(self._objects):
            try:
                self._cluster.delete(resource, name)
            except (Refusal, LaunchError) as error:
                left.append(f"{resource.plural}/{name} ({' '.join(str(error).split())[:200]})")
        if left:
            names = " ".join(text.partition(" ")[0] for text in left)
            problem = Problem(
                "kubernetes-left",
                "some objects of the run could not be deleted.",
                left,
                f"kubectl delete {names} -n {self._cluster.namespace}",
            )
            say_error(problem)
        self._objects.clear()
