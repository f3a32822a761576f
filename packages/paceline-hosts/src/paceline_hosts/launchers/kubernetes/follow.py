"""Follows a run that was submitted: shows the lines of its pods as they come, why a pod does not start, and how it ends.

    watch of the run's object --.
    watch of its pods ----------+--> one queue --> Follower.next: lines to standard output, notices to standard error
    log of each container ------'

A thread reads each source and only puts what it reads into the queue. All decisions are taken in the main thread.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline.base.errors import LaunchError, Problem
from paceline.base.exits import PREEMPTED
from paceline.base.terminal import say
from paceline_hosts.launchers.kubernetes.client import Cluster
from paceline_hosts.launchers.kubernetes.kinds.kind import PODS, WorkloadKind, WorkloadState
from paceline_hosts.launchers.kubernetes.pod import selector
from paceline_hosts.launchers.kubernetes.refusals import Refusal
from paceline_hosts.launchers.kubernetes.run import NO_PACELINE, PodRun
from paceline_hosts.launchers.kubernetes.shown_lines import ShownLines

_RETRY_S = 1.0
_PATIENCE_S = 120.0  # how long the cluster may not answer
_LAST_LINES_S = 10.0  # how long the last lines may take to arrive after the run has ended
# Errors of a launcher whose processes were stopped because of another node.
_CONSEQUENCES = ("node-failed", "launch-cut-off")
_OF_THE_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
# A pod that cannot start is an error only if that lasts: a registry may fail to answer once, and the Secret is created a
# moment after the pods. How long each reason may last:
_MAY_PASS_S = {
    "ErrImagePull": 20.0,
    "ImagePullBackOff": 20.0,
    "CreateContainerConfigError": 60.0,
    "CreateContainerError": 60.0,
    "RunContainerError": 60.0,
}


class Follower:
    """Collects what the cluster tells about a run.

    Args:
        cluster: the cluster in which it runs.
        run: what was submitted.
        kind: the kind of the run's object.
        main: the run's object, as the cluster created it.
        shown: numbers of the nodes whose lines are shown; None for all.

    Attributes:
        pods: all pods by uid, as last seen; also those that are gone.
        present: uids of the pods that are there now.
        state: the state of the run's object.
        deleted: whether that object is gone.
    """

    def __init__(
        self, cluster: Cluster, run: PodRun, kind: WorkloadKind, main: dict[str, Any], shown: frozenset[int] | None
    ) -> None:
        self._cluster = cluster
        self._run = run
        self._kind = kind
        self._shown = shown
        self.pods: dict[str, dict[str, Any]] = {}
        self.present: set[str] = set()
        self.state = WorkloadState()
        self.deleted = False
        self._events: queue.Queue[tuple[str, Any]] = queue.Queue()
        # Whether a log was read to its end, by the uid of the pod and the number of restarts of its container.
        self._logs: dict[tuple[str, int], threading.Event] = {}
        self._notices: set[str] = set()
        # By the uid of the pod, so that a restarted container goes on where the one before it ended.
        self._shown_lines: dict[str, ShownLines] = {}
        self._odd_since: dict[str, float] = {}  # since when a pod waits for a reason that may pass, by uid
        self._lost: LaunchError | None = None
        # Each watch has a thread of its own, because this client can only wait for one answer at a time.
        # The run's object counts as present from the start: if somebody deletes it before the first list, the watch reports
        # that, and does not wait for an object that never comes.
        objects: dict[str, dict[str, Any]] = {main["metadata"]["uid"]: main}
        pods: dict[str, dict[str, Any]] = {}
        # The dictionaries hold what a watch has seen. A watch that begins again compares with them, so that it also reports
        # what was deleted while it was away.
        self._watch("object", lambda: cluster.watch(kind.resource, objects, fieldSelector=f"metadata.name={run.name}"))
        self._watch("pod", lambda: cluster.watch(PODS, pods, labelSelector=selector(run)))

    def next(self, timeout_s: float) -> None:
        """Takes in what arrives within the next `timeout_s` seconds, and checks that the pods can start.

        Raises:
            LaunchError: `kubernetes-image`, `kubernetes-pod` for a pod that cannot start; `kubernetes-lost`.
        """
        deadline = time.monotonic() + timeout_s
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                what, value = self._events.get(timeout=remaining)
            except queue.Empty:
                break
            self._take_in(what, value)
        self.check_started()

    def drain(self) -> None:
        """Shows the last lines after the end of the run, which may still be on their way."""
        deadline = time.monotonic() + _LAST_LINES_S
        while time.monotonic() < deadline:
            reading = [key for key, read_to_end in self._logs.items() if not read_to_end.is_set()]
            # Pods and the run's object are two watches. The run may be reported as failed before the pod that has failed.
            unexplained = self.state.failed and not self._failures()
            if not reading and not unexplained and self._events.empty():
                return
            try:
                self._take_in(*self._events.get(timeout=0.1))
            except queue.Empty:
                continue

    def _take_in(self, what: str, value: Any) -> None:
        if what == "line":
            sys.stdout.buffer.write(value)
            sys.stdout.buffer.flush()
        elif what == "lost":
            raise value
        elif what == "object":
            event, manifest = value
            self.deleted = event == "DELETED"
            if not self.deleted:
                self.state = self._kind.state(manifest)
        else:
            self._pod(*value)

    def _pod(self, event: str, pod: dict[str, Any]) -> None:
        """Takes in what a pod is now; begins to read the log of a container that has started."""
        uid = pod["metadata"]["uid"]
        name = pod["metadata"]["name"]
        self.pods[uid] = pod
        if event == "DELETED":
            self.present.discard(uid)
            return
        self.present.add(uid)
        node = self._kind.node_of(pod)
        for condition in pod.get("status", {}).get("conditions") or ():
            if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
                self._say_once(f"node{node} waits for a place: {condition.get('message', '')}")
        status = _container(pod, self._kind.container)
        started = any(status.get("state", {}).get(phase) for phase in ("running", "terminated"))
        key = (uid, int(status.get("restartCount", 0)))
        if not started or key in self._logs:
            return
        where = pod["spec"].get("nodeName", "")
        on_host = f" on {where}" if where else ""
        self._say_once(f"node{node} is pod {name}{on_host}")
        self._logs[key] = threading.Event()
        threading.Thread(target=self._read_log, args=(key, name, node), daemon=True).start()

    def check_started(self) -> None:
        """Finds pods that will never start.

        Raises:
            LaunchError: `kubernetes-image`, `kubernetes-pod`.
        """
        for uid in self.present:
            pod = self.pods[uid]
            status = _container(pod, self._kind.container)
            problem = self._no_start(pod, status)
            if problem is not None:
                raise LaunchError.of([problem])

    def _no_start(self, pod: Mapping[str, Any], status: Mapping[str, Any]) -> Problem | None:
        """Returns why a pod will never start; None if it may start, or has started."""
        name = pod["metadata"]["name"]
        uid = pod["metadata"]["uid"]
        waiting = status.get("state", {}).get("waiting") or {}
        ended = self._ended(pod)
        reason = waiting.get("reason", "")
        message = waiting.get("message", "")
        if not self._stays(uid, reason):
            return None
        if reason in _OF_THE_IMAGE:
            fix = "correct --image; for a private registry name a Secret under imagePullSecrets in the --values file"
            what = f"the image {self._run.image} cannot be had."
            return Problem("kubernetes-image", what, f"pod {name}: {reason}: {message}", fix)
        if reason in _MAY_PASS_S:
            fix = f"`kubectl describe pod {name} -n {self._cluster.namespace}` tells more; correct the --values file"
            return Problem("kubernetes-pod", f"pod {name} cannot start.", f"{reason}: {message}", fix)
        if ended.get("exitCode") == NO_PACELINE and "no paceline" in ended.get("message", ""):
            what = f"the image {self._run.image} has no paceline."
            fix = "install Paceline in the image, for the Python that `python3` starts there"
            return Problem("kubernetes-image", what, f"pod {name}: {ended['message'].strip()}", fix)
        if ended.get("reason") in ("StartError", "ContainerCannotRun"):
            what = f"python3 cannot be started in the image {self._run.image}."
            why = f"pod {name}: {ended['reason']}: {ended.get('message', '')}"
            return Problem("kubernetes-image", what, why, "use an image with Python and Paceline")
        return None

    def _stays(self, uid: str, reason: str) -> bool:
        """Returns whether the reason for which a pod waits will not pass by itself.

        A reason in `_MAY_PASS_S` counts after its time; every other one counts at once.
        """
        if reason not in _MAY_PASS_S:
            self._odd_since.pop(uid, None)
            return True
        since = self._odd_since.setdefault(uid, time.monotonic())
        return time.monotonic() - since >= _MAY_PASS_S[reason]

    def exit_code(self) -> int:
        """Returns the exit code of the container that failed first, in the newest pods; 1 if no container has one."""
        failed = self._failures()
        if not failed:
            return 1
        if all(state["exitCode"] == PREEMPTED for state in failed):
            return PREEMPTED
        # One failure ends the launchers on all nodes. Those that ended because of another node say so, and are left out.
        causes = [state for state in failed if not _is_consequence(state)] or failed
        # Times in the API are ISO 8601 in UTC, so their order as text is that in time.
        first = min(causes, key=lambda state: state.get("finishedAt") or "")
        return int(first["exitCode"])

    def _failures(self) -> list[dict[str, Any]]:
        """Returns how the containers ended that failed, in the newest pod of each node."""
        ended = [self._ended(pod) for pod in self._last_pods()]
        return [state for state in ended if state.get("exitCode")]

    def _ended(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """Returns how the container of a pod has ended; {} while it has not."""
        ended: dict[str, Any] | None = _container(pod, self._kind.container).get("state", {}).get("terminated")
        return ended or {}

    def all_saved(self) -> bool:
        """Returns whether every container has saved and ended, or ended well."""
        codes = {self._ended(pod).get("exitCode") for pod in self._last_pods()}
        return PREEMPTED in codes and codes <= {0, PREEMPTED}

    def why(self) -> list[str]:
        """Why the run has failed: what the controller and the pods say."""
        reasons = [f"{self.state.reason}: {self.state.message}".strip(": ")]
        for pod in self._last_pods():
            node = self._kind.node_of(pod)
            ended = self._ended(pod)
            if ended.get("exitCode"):
                detail = f" ({ended['reason']})" if ended.get("reason") not in (None, "Error") else ""
                reasons.append(f"node{node} (pod {pod['metadata']['name']}) ended with {ended['exitCode']}{detail}")
            elif pod.get("status", {}).get("reason"):  # of the pod itself, for example after an eviction
                status = pod["status"]
                reasons.append(
                    f"node{node} (pod {pod['metadata']['name']}): {status['reason']}: {status.get('message', '')}"
                )
        return reasons

    def _last_pods(self) -> list[dict[str, Any]]:
        """Returns the newest pod of each node."""
        newest: dict[int, dict[str, Any]] = {}
        for pod in sorted(self.pods.values(), key=_made_at):
            newest[self._kind.node_of(pod)] = pod
        return list(newest.values())

    def _say_once(self, line: str) -> None:
        if line not in self._notices:
            self._notices.add(line)
            say(line)

    # -- threads ------------------------------------------------------------------------------------------------

    def _watch(self, what: str, begin: Callable[[], Iterator[tuple[str, dict[str, Any]]]]) -> None:
        """Starts a thread that puts the events of a watch into the queue.

        If the cluster does not answer, the thread begins the watch again. After `_PATIENCE_S` it gives up.
        """

        def read() -> None:
            failing_since: float | None = None
            while not self._cluster.closed:
                try:
                    for event in begin():
                        failing_since = None
                        self._events.put((what, event))
                except LaunchError as error:
                    now = time.monotonic()
                    failing_since = failing_since or now
                    # An exception in this thread would be lost; the main thread raises it when it takes it from the queue.
                    if now - failing_since > _PATIENCE_S:
                        self._events.put(("lost", self._lost_error(error.problems[0].why)))
                        return
                except Refusal as refusal:
                    self._events.put(("lost", LaunchError.of([refusal.problem(self._cluster.namespace)])))
                    return
                time.sleep(_RETRY_S)

        threading.Thread(target=read, daemon=True).start()

    def _lost_error(self, why: Any) -> LaunchError:
        return LaunchError(
            "kubernetes-lost",
            f"the cluster has not answered for {_PATIENCE_S:g} s; the run {self._run.name} may go on there.",
            why=why,
            fix=f"`kubectl logs -f -l {selector(self._run)} -n {self._cluster.namespace}` shows it; "
            f"`kubectl delete {self._kind.resource.plural} {self._run.name} -n {self._cluster.namespace}` ends it",
        )

    def _read_log(self, key: tuple[str, int], pod: str, node: int) -> None:
        """Puts the lines of one container into the queue, each once, over as many connections as it takes."""
        mark = f"node{node}: ".encode()
        is_shown = self._shown is None or node in self._shown
        shown_lines = self._shown_lines.setdefault(key[0], ShownLines())
        try:
            # Once the container runs again, the cluster has only its new log, which another thread reads.
            while is_shown and not self._cluster.closed and self._restarts(key[0]) == key[1]:
                # Asked before the log is read: a log that was cut while its container ended is read once more.
                has_ended = self._has_ended(key[0])
                try:
                    lines = self._cluster.log(pod, self._kind.container, shown_lines.last, has_ended=has_ended)
                    for text in shown_lines.new_lines(lines):
                        self._events.put(("line", mark + text + b"\n"))
                except Refusal as refusal:
                    if refusal.status in (403, 404):  # 404: the pod is gone
                        return
                except LaunchError:
                    pass  # if the cluster stays silent, the watches report that
                if has_ended:
                    return
                if not self._has_ended(key[0]):
                    time.sleep(_RETRY_S)
        finally:
            self._logs[key].set()

    def _restarts(self, uid: str) -> int:
        """Returns how often the container of a pod was started again."""
        return int(_container(self.pods[uid], self._kind.container).get("restartCount", 0))

    def _has_ended(self, uid: str) -> bool:
        """Returns whether the container of a pod has ended, so that its log holds no more."""
        status = _container(self.pods[uid], self._kind.container)
        return uid not in self.present or not status.get("state", {}).get("running")


def _is_consequence(ended: Mapping[str, Any]) -> bool:
    """Returns whether a container says that it ended because of another one."""
    message = str(ended.get("message", ""))
    return any(f"[{code}]" in message for code in _CONSEQUENCES)


def _made_at(pod: Mapping[str, Any]) -> str:
    return pod["metadata"].get("creationTimestamp") or ""


def _container(pod: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Status of a pod's container; {} before there is one."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return next((status for status in statuses if status["name"] == name), {})
