"""Small controllers and a kubelet for `kubernetes_api.py`: what JobSet, Job, TrainJob and PyTorchJob make of their objects.

A pod is either a function of the test (`Pod.say`, `Pod.asked_to_end`), or a real process in namespaces of its own: process 1 of
its process namespace, with its host name, its /etc/hosts, its /paceline/script, and exactly the variables that the kind gives.
What they do after a failure is what the rules in the manifest say, so that these are tried and not only read.
"""

from __future__ import annotations

import os
import queue
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes_api import ApiServer, Object, now
from warm_python import executable

INDEX = "batch.kubernetes.io/job-completion-index"
_BOOT = """
set -e
hostname {hostname}
mount -t tmpfs root {root}
for entry in /*; do
    if [ -L "$entry" ]; then
        cp -P "$entry" {root}
    elif [ -d "$entry" ]; then
        mkdir {root}"$entry"
        mount --rbind "$entry" {root}"$entry"
    fi
done
mkdir -p {root}/paceline/script {root}/paceline/tls
mount --bind {folder}/script {root}/paceline/script
mount --bind {folder}/tls {root}/paceline/tls
mount --bind {folder}/hosts {root}/etc/hosts
mount --bind {folder}/nsswitch.conf {root}/etc/nsswitch.conf
cd {folder}/work
exec {chroot} {root} sh -c 'cd {folder}/work && exec "$@"' pod "$@"
"""


def lacking() -> str:
    """Why pods cannot be namespaces here; "" where they can."""
    if os.geteuid() != 0:
        return "needs root"
    words = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    return f"needs namespaces ({done.stderr.strip()})" if done.returncode else ""


class Pod:
    """One pod.

    Attributes:
        number: of its node.
        attempt: how often the run had begun anew before it.
        host: its host name, as the others know it.
        env: what its container finds.
        command: what it runs.
        lines: what it has written.
    """

    def __init__(self, cluster: Controllers, manifest: Object, number: int, host: str, env: dict[str, str]) -> None:
        self.manifest, self.number, self.host, self.env = manifest, number, host, env
        (container,) = manifest["spec"]["containers"]
        self.container = container["name"]
        self.command = cluster.command or [*container.get("command", ()), *container.get("args", ())]
        self.attempt = cluster.restarts
        self.asked_to_end = threading.Event()
        self.code: int | None = None
        self._cluster = cluster
        self._process: subprocess.Popen[bytes] | None = None
        self.lines: list[str] = []

    @property
    def name(self) -> str:
        """Its name in the cluster."""
        return str(self.manifest["metadata"]["name"])

    def say(self, text: str) -> None:
        """Writes to its log."""
        self.lines.append(text)
        self._cluster.api.log(self.manifest["metadata"]["uid"], text)

    def status(self, phase: str, **state: Any) -> None:
        """Tells the API how it is."""
        (kind,) = state
        status = {"name": self.container, "restartCount": 0, "state": state, "ready": kind == "running"}
        self.manifest["status"] = {"phase": phase, "containerStatuses": [status]}
        current = self._cluster.api.objects.get(("pods", self.manifest["metadata"]["namespace"], self.name))
        if current is not None:
            self.manifest["metadata"] = current["metadata"]
            self.manifest = self._cluster.api.put("pods", self.manifest)

    def start(self, run: Callable[[Pod], int] | None) -> None:
        """Runs it: a function of the test, or its command where there is none."""
        threading.Thread(target=self._live, args=(run or self._as_process,), daemon=True).start()

    def _live(self, run: Callable[[Pod], int]) -> None:
        self.status("Running", running={"startedAt": now()})
        code = run(self)
        self.code = 128 - code if code < 0 else code
        message = "\n".join(self.lines[-80:])[-2048:] if code else ""
        ended = {
            "exitCode": self.code,
            "finishedAt": now(),
            "message": message,
            "reason": "Error" if code else "Completed",
        }
        self.status("Failed" if code else "Succeeded", terminated=ended)
        self._cluster.events.put(("ended", self))

    def _as_process(self, pod: Pod) -> int:
        folder = self._cluster.folder / self.name
        root = tempfile.mkdtemp(prefix="pod-", dir=self._cluster.folder)
        for part in ("script", "tls", "work"):
            (folder / part).mkdir(parents=True)
        for volume in self.manifest["spec"]["volumes"]:
            for secret in self._cluster.api.find("secrets", volume.get("secret", {}).get("secretName", "none")):
                for name, text in secret["stringData"].items():
                    (folder / "tls" / name).write_text(text)
        for name, text in self._cluster.config_map().items():
            (folder / "script" / name).write_text(text)
        (folder / "hosts").write_text(self._cluster.hosts(self))
        (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        # An image need not have it on its PATH.
        chroot = shutil.which("chroot", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        boot = _BOOT.format(hostname=self.name[:63], root=root, folder=folder, chroot=chroot)
        words = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
        env = {**self.env, **self._cluster.image}
        command = [*words, "sh", "-c", boot, "boot", *self.command]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.say(line.decode(errors="replace").rstrip("\n"))
        code = self._process.wait()
        os.rmdir(root)
        return code

    def signal(self, number: int) -> None:
        """Signals process 1 of the container."""
        self.asked_to_end.set()
        self._to_first_process(number)

    def kill(self) -> None:
        """Ends the container at once, as a lost node does."""
        # Killing `unshare` alone would count the container as ended while its processes still have their ports.
        if self._process is not None and not self._to_first_process(signal.SIGKILL):
            self._process.kill()

    def _to_first_process(self, number: int) -> bool:
        """Signals process 1 of the container, where there is one; `unshare` ends after it and all its children."""
        if self._process is None or self._process.poll() is not None:
            return False
        try:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
            os.kill(int(children.split()[0]), number)
        except (OSError, IndexError):
            return False
        return True


class Controllers:
    """What a cluster does with the objects in an API server, in a thread of its own, from `with` to its end.

    Args:
        api: the server.
        folder: for pods that are processes.
        run: what a pod does; None for its command, as a process.

    Attributes:
        pods: all pods that there have been.
        restarts: how often the group was started again; `counted` those that count.
        image: variables that the image sets.
        command: what all containers run in place of what their manifest says; [] for that.
        starting: a status of a container that never starts, in place of running it.
    """

    def __init__(self, api: ApiServer, folder: Path, run: Callable[[Pod], int] | None = None) -> None:
        self.api, self.folder, self.run = api, folder, run
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.pods: list[Pod] = []
        self.restarts = self.counted = self.failures = 0
        self.image = {
            "PATH": f"{Path(executable()).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        self.command: list[str] = []
        self.starting: Object | None = None
        self._main: tuple[str, Object] | None = None
        api.on_change.append(self._notice)

    def __enter__(self) -> Controllers:
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.events.put(("stop", None))
        self._thread.join(10)
        for pod in self.pods:
            pod.asked_to_end.set()
            pod.kill()
        for pod in self.pods:
            deadline = time.monotonic() + 10
            while pod.code is None and self.starting is None and time.monotonic() < deadline:
                time.sleep(0.02)
            shutil.rmtree(self.folder / pod.name, ignore_errors=True)

    def _notice(self, event: str, plural: str, stored: Object) -> None:
        if plural in ("jobsets", "jobs", "trainjobs", "pytorchjobs") and event != "MODIFIED":
            self.events.put((event, (plural, stored)))
        if plural == "pods" and event == "MODIFIED" and "deletionTimestamp" in stored["metadata"]:
            self.events.put(("delete pod", stored["metadata"]["uid"]))

    def _loop(self) -> None:
        asked: set[str] = set()
        while True:
            event, value = self.events.get()
            if event == "stop":
                return
            if event == "ADDED":
                self._main = value
                # The objects beside it come a moment later, and pods wait for those that they name.
                template = self._pod_of(0)[0]
                needed = ["secrets"]
                if any("configMap" in volume for volume in template["spec"]["volumes"]):
                    needed.append("configmaps")
                deadline = time.monotonic() + 60
                while not all(map(self.api.find, needed)) and time.monotonic() < deadline:
                    time.sleep(0.02)
                self._start(range(self._size()))
            elif event == "DELETED":
                self._main = None
            elif event == "delete pod" and value not in asked:
                asked.add(value)
                for pod in self.pods:
                    if pod.manifest["metadata"]["uid"] == value:
                        self._remove(pod)
            elif event == "ended":
                if "deletionTimestamp" in self._metadata(value):
                    self.api.remove("pods", "teams", value.name)
                elif self._main is not None:
                    self._ended(value)

    def _metadata(self, pod: Pod) -> Object:
        stored = self.api.objects.get(("pods", pod.manifest["metadata"]["namespace"], pod.name))
        return stored["metadata"] if stored else {}

    def _remove(self, pod: Pod) -> None:
        if pod.code is not None or self.starting is not None:
            self.api.remove("pods", pod.manifest["metadata"]["namespace"], pod.name)
        elif self._metadata(pod).get("deletionGracePeriodSeconds") == 0:
            pod.asked_to_end.set()
            pod.kill()
        else:
            pod.signal(signal.SIGTERM)

    # -- the kinds ----------------------------------------------------------------------------------------------

    def _job(self) -> Object:
        """Specification of the Indexed Job that the object stands for."""
        assert self._main is not None
        plural, main = self._main
        if plural == "jobs":
            return main["spec"]
        jobset = main["spec"]
        if plural == "trainjobs":
            (runtime,) = self.api.find("trainingruntimes", main["spec"]["runtimeRef"]["name"])
            jobset = runtime["spec"]["template"]["spec"]
        return jobset["replicatedJobs"][0]["template"]["spec"]

    def _size(self) -> int:
        assert self._main is not None
        plural, main = self._main
        if plural == "pytorchjobs":
            return sum(replica["replicas"] for replica in main["spec"]["pytorchReplicaSpecs"].values())
        return int(self._job()["completions"])

    def _start(self, numbers: Any) -> None:
        for number in numbers:
            template, name, host, about, env = self._pod_of(number)
            assert self._main is not None
            main = self._main[1]
            owner = {"kind": main["kind"], "name": main["metadata"]["name"], "uid": main["metadata"]["uid"]}
            metadata = {
                "name": name,
                "namespace": main["metadata"]["namespace"],
                "labels": {**template["metadata"].get("labels", {}), **about.get("labels", {})},
                "annotations": {**template["metadata"].get("annotations", {}), **about.get("annotations", {})},
                "ownerReferences": [owner],
            }
            spec = {**template["spec"], "nodeName": f"machine{number}"}
            stored = self.api.put("pods", {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}})
            pod = Pod(self, stored, number, host, {**self._variables(stored), **env, "HOSTNAME": name})
            self.pods.append(pod)
            if self.starting is not None:
                pod.status("Pending", **self.starting)
            else:
                pod.start(self.run)

    def _pod_of(self, number: int) -> tuple[Object, str, str, Object, dict[str, str]]:
        """Template, name, host name, labels and annotations, and further variables of a pod."""
        assert self._main is not None
        plural, main = self._main
        run = main["metadata"]["name"]
        index = {"annotations": {INDEX: str(number)}, "labels": {INDEX: str(number)}}
        if plural == "pytorchjobs":
            return self._pytorch_pod(number, main, run)
        template = self._job()["template"]
        if plural == "jobs":
            host = f"{run}-{number}"
            env = {"JOB_COMPLETION_INDEX": str(number)}
            return template, f"{host}-{secrets.token_hex(2)}", f"{host}.{template['spec']['subdomain']}", index, env
        host = f"{run}-node-0-{number}"
        env = {"JOB_COMPLETION_INDEX": str(number)}
        if plural == "trainjobs":
            trainer = main["spec"]["trainer"]
            env |= {
                "PET_NNODES": str(trainer["numNodes"]),
                "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_NODE_RANK": str(number),
                "PET_MASTER_ADDR": f"{run}-node-0-0.{run}",
                "PET_MASTER_PORT": "29400",
            }
        labels = {"jobset.sigs.k8s.io/jobset-name": run, "jobset.sigs.k8s.io/replicatedjob-name": "node"}
        index["labels"] |= labels
        return template, f"{host}-{secrets.token_hex(2)}", f"{host}.{run}", index, env

    def _pytorch_pod(self, number: int, main: Object, run: str) -> tuple[Object, str, str, Object, dict[str, str]]:
        role, place = ("Master", 0) if number == 0 else ("Worker", number - 1)
        name = f"{run}-{role.lower()}-{place}"
        kubeflow = "training.kubeflow.org/"
        labels = {
            f"{kubeflow}job-name": run,
            f"{kubeflow}replica-type": role.lower(),
            f"{kubeflow}replica-index": str(place),
        }
        size = str(self._size())
        env = {
            "PYTHONUNBUFFERED": "1",
            "MASTER_PORT": "23456",
            "PET_MASTER_PORT": "23456",
            "MASTER_ADDR": f"{run}-master-0",
            "PET_MASTER_ADDR": f"{run}-master-0",
            "WORLD_SIZE": size,
            "RANK": str(number),
            "PET_NODE_RANK": str(number),
            "PET_NPROC_PER_NODE": main["spec"]["nprocPerNode"],
            "PET_NNODES": size,
        }
        template = main["spec"]["pytorchReplicaSpecs"][role]["template"]
        return template, name, name, {"labels": labels}, env

    def _variables(self, pod: Object) -> dict[str, str]:
        """What the kubelet makes of a container's `env` and `envFrom`."""
        (container,) = pod["spec"]["containers"]
        env = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
        for source in container.get("envFrom", ()):
            for secret in self.api.find("secrets", source["secretRef"]["name"]):
                env |= secret["stringData"]
        for entry in container.get("env", ()):
            env[entry["name"]] = entry.get("value", pod["metadata"]["annotations"].get(INDEX, ""))
        return env

    def config_map(self) -> dict[str, str]:
        """The script that went along."""
        return {name: text for found in self.api.find("configmaps") for name, text in found["data"].items()}

    def hosts(self, pod: Pod) -> str:
        """The pod's /etc/hosts: its own name, and those that the cluster's DNS would give for the others."""
        lines = ["127.0.0.1 localhost"]
        for number in range(self._size()):
            _, _, host, _, _ = self._pod_of(number)
            own = f" {pod.name}" if number == pod.number else ""
            lines.append(f"127.77.{os.getpid() % 250}.{number + 1} {host}{own}")
        return "\n".join(lines) + "\n"

    # -- what becomes of them -----------------------------------------------------------------------------------

    def _ended(self, pod: Pod) -> None:
        assert self._main is not None
        plural, main = self._main
        current = [p for p in self.pods if p.attempt == self.restarts or plural == "jobs"]
        if pod.code == 0:
            done = {p.number for p in current if p.code == 0}
            if len(done) == self._size() or (plural == "pytorchjobs" and pod.number == 0):
                self._finish(
                    "Succeeded" if plural == "pytorchjobs" else "Completed" if plural == "jobsets" else "Complete"
                )
            return
        if pod.attempt != self.restarts and plural != "jobs":
            return  # of a group that was given up
        if plural == "pytorchjobs":
            self._finish("Failed", "PyTorchJobFailed", f"pod {pod.name} failed")
            return
        job = self._job()
        rule = next(
            (r for r in job["podFailurePolicy"]["rules"] if pod.code in r.get("onExitCodes", {}).get("values", ())),
            None,
        )
        if plural == "jobs":
            self.failures += rule is None or rule["action"] != "Ignore"
            if self.failures > job["backoffLimit"]:
                self._finish("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
                return
            self.restarts += 1
            self._start([pod.number])
            return
        policy = (
            main["spec"] if plural == "jobsets" else self.api.find("trainingruntimes")[0]["spec"]["template"]["spec"]
        )
        policy = policy["failurePolicy"]
        reason = "PodFailurePolicy" if rule is not None and rule["action"] == "FailJob" else "BackoffLimitExceeded"
        free = any(
            reason in r["onJobFailureReasons"] and r["action"] == "RestartJobSetAndIgnoreMaxRestarts"
            for r in policy["rules"]
        )
        self.counted += not free
        if self.counted > policy["maxRestarts"]:
            self._finish(
                "Failed", "ReachedMaxRestarts", f"jobset failed due to reaching max number of restarts ({reason})"
            )
            return
        self.restarts += 1
        for other in current:
            if other.code is None:
                other.signal(signal.SIGTERM)
        deadline = time.monotonic() + 45
        while any(other.code is None for other in current) and time.monotonic() < deadline:
            time.sleep(0.02)
        for other in current:
            self.api.remove("pods", other.manifest["metadata"]["namespace"], other.name)
        self._start(range(self._size()))

    def _finish(self, condition: str, reason: str = "", message: str = "") -> None:
        assert self._main is not None
        plural, main = self._main
        found = self.api.find(plural, main["metadata"]["name"])
        if found:
            stored = found[0]
            stored["status"] = {
                "conditions": [{"type": condition, "status": "True", "reason": reason, "message": message}]
            }
            self.api.put(plural, stored)
