"""`paceline launch --on kubernetes` against an API server of ours: what it makes, follows, refuses and takes away."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from paceline.cli import main as cli

pytest.importorskip("kubernetes", reason="needs the client: `make setup`")
pytest.importorskip("aiohttp", reason="needs aiohttp: `make setup`")
from kubernetes_api import ApiServer, until
from kubernetes_pods import Controllers, Pod

from paceline_hosts.launchers.kubernetes import follow
from paceline_hosts.launchers.kubernetes.shown_lines import ShownLines

ALL_GROUPS = ("jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1", "kubeflow.org/v1", "kueue.x-k8s.io/v1beta1")
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    for name in [name for name in os.environ if name.startswith(("PACELINE", "SLURM", "PET_", "KUBE"))]:
        monkeypatch.delenv(name)
    with ApiServer(tmp_path, ALL_GROUPS) as server:
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.py").write_text("print('hello')\n")
        for name, gpus in (("small", "2"), ("large", "8")):
            server.put("nodes", {"metadata": {"name": name}, "status": {"allocatable": {"nvidia.com/gpu": gpus}}})
        yield server


def launch(*words: str) -> int:
    return cli.main(["launch", "--on", "kubernetes", "--image", "registry.local/train:1", "--nodes", "2", *words])


def greet(pod: Pod) -> int:
    pod.say(f"[rank{pod.number}]: hello")
    return 0


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "pytorchjob", "job"])
def test_a_run_is_made_followed_and_taken_away(
    api: ApiServer, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    api.on_change.append(lambda event, plural, o: made.append(plural) if event == "ADDED" else None)
    with Controllers(api, tmp_path, greet):
        assert launch("--gpus", "8", "--kind", kind, "train.py") == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["node0: [rank0]: hello", "node1: [rank1]: hello"]
    assert "node0 is pod train-" in err and "on machine1" in err
    assert api.left() == []
    expected = {"secrets", "configmaps", f"{kind}s", "pods"}
    assert expected <= set(made) and ("services" in made) == (kind == "job")


def test_what_the_cluster_has_decides_the_kind(
    api: ApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for expected in ("JobSet", "TrainJob", "PyTorchJob", "Job"):
        with Controllers(api, tmp_path, greet):
            assert launch("--procs", "1", "train.py") == 0
        assert f"paceline: {expected} train-" in capfd.readouterr().err
        api.on_change.clear()
        api.groups.pop(1 if len(api.groups) > 1 else 0) if expected != "Job" else None


def test_a_dry_run_asks_no_cluster(api: ApiServer, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("--gpus", "8", "--dry-run", "train.py", "--lr", "0.1") == 0
    assert api.requests == []
    manifests = list(yaml.safe_load_all(capfd.readouterr().out))
    assert [manifest["kind"] for manifest in manifests] == ["JobSet", "ConfigMap"]
    (job,) = manifests[0]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["launch", "--tee", "3", "/paceline/script/train.py", "--lr", "0.1"]
    assert manifests[1]["data"] == {"train.py": "print('hello')\n"}


def test_the_exit_code_is_that_of_the_rank_that_failed_first(
    api: ApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(pod: Pod) -> int:
        if pod.number == 0:
            time.sleep(0.3)
            pod.say("paceline.LaunchError: another node failed, and this one was stopped.  [node-failed]")
            return 1
        pod.say("ValueError: the cause")
        return 7

    with Controllers(api, tmp_path, run):
        assert launch("--procs", "1", "train.py") == 7
    out, err = capfd.readouterr()
    assert "node1: ValueError: the cause" in out
    assert "[kubernetes-failed]" in err and "node1 (pod train-" in err and "ended with 7" in err
    assert api.left() == []


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_a_restart_is_followed_and_counted(
    api: ApiServer, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(pod: Pod) -> int:
        pod.say(f"attempt {pod.attempt}")
        # Its pods are gone soon after it, and their logs with them.
        until(lambda: any(f"/{pod.name}/log" in path for _, path, *_ in api.requests), "somebody reads the log")
        return 5 if pod.number == 1 else 0 if pod.attempt or kind == "job" else pod.asked_to_end.wait(5) * 1

    with Controllers(api, tmp_path, run) as controllers:
        assert launch("--procs", "1", "--kind", kind, "--max-restarts", "1", "train.py") == 5
        assert controllers.restarts == (1 if kind == "jobset" else 2)
    out = capfd.readouterr().out
    assert "node1: attempt 0\n" in out and "node1: attempt 1\n" in out
    assert api.left() == []


def test_exit_code_75_starts_the_group_again_and_counts_as_nothing(
    api: ApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Controllers(api, tmp_path, lambda pod: 75 if pod.attempt < 2 else 0) as controllers:
        assert launch("--procs", "1", "train.py") == 0
    assert (controllers.restarts, controllers.counted) == (2, 0)


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_deletes_the_run_and_pods_save_first(
    api: ApiServer, tmp_path: Path, asked: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(pod: Pod) -> int:
        pod.say("begun")
        assert pod.asked_to_end.wait(20)
        pod.say("saved")
        return 75

    def ask() -> None:
        until(lambda: len([r for r in api.requests if "/log" in r[1]]) == 2, "two logs")
        os.kill(os.getpid(), asked)

    thread = threading.Thread(target=ask)
    thread.start()
    with Controllers(api, tmp_path, run):
        assert launch("--procs", "1", "train.py") == (130 if asked == signal.SIGINT else 75)
        until(lambda: api.left() == [], "an empty cluster")
    thread.join()
    out, err = capfd.readouterr()
    assert out.count("saved") == 2 and "all pods have saved and ended" in err


def test_a_second_signal_waits_no_longer(api: ApiServer, tmp_path: Path) -> None:
    def ask() -> None:
        until(lambda: len([r for r in api.requests if "/log" in r[1]]) == 2, "two logs")
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: any(r[0] == "DELETE" for r in api.requests), "the deletion")
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=ask)
    thread.start()
    ended = threading.Event()
    with Controllers(api, tmp_path, lambda pod: int(ended.wait(30))):
        begun = time.monotonic()
        assert launch("--procs", "1", "train.py") == 130
        assert time.monotonic() - begun < 15
        ended.set()
    thread.join()
    assert sum(method == "DELETE" and "/pods/" in path for method, path in api.requests) == 2


def test_a_log_that_breaks_off_goes_on_where_it_was(
    api: ApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    api.cut_logs_after = 3

    def run(pod: Pod) -> int:
        for number in range(0, 8, 2):
            pod.say(f"line {number}\nline {number + 1}")  # two lines with the same time stamp
            time.sleep(0.05)
        time.sleep(2.5)
        return 0

    with Controllers(api, tmp_path, run):
        assert launch("--procs", "1", "train.py") == 0
    lines = capfd.readouterr().out.splitlines()
    for node in (0, 1):
        assert [line for line in lines if line.startswith(f"node{node}")] == [f"node{node}: line {n}" for n in range(8)]


def test_a_line_is_recognised_by_its_time_stamp_and_its_number_there() -> None:
    """The streams of a container may be a little out of order, and the kubelet goes back to the beginning of the second."""
    second = "2026-11-22T08:15:"
    first = [(second + "00.9", b"a"), (second + "01.5", b"b"), (second + "01.5", b"b"), (second + "01.4", b"c")]
    shown = ShownLines()
    assert list(shown.new_lines(first)) == [b"a", b"b", b"b", b"c"]
    assert shown.last == second + "01.5"
    again = [*first[1:], (second + "01.5", b"d"), (second + "09.0", b"e")]
    assert list(shown.new_lines(again)) == [b"d", b"e"]
    assert list(shown.new_lines([first[0], *again])) == []


def test_a_watch_whose_version_is_forgotten_lists_again(api: ApiServer, tmp_path: Path) -> None:
    def run(pod: Pod) -> int:
        time.sleep(0.3)
        api.forget()
        time.sleep(0.7)
        return 0

    with Controllers(api, tmp_path, run):
        assert launch("--procs", "1", "train.py") == 0


def test_only_the_ranks_that_are_asked_for(api: ApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Controllers(api, tmp_path, greet):
        assert launch("--procs", "2", "--ranks", "3", "train.py") == 0
    assert capfd.readouterr().out == "node1: [rank1]: hello\n"


def test_without_waiting_it_leaves_the_run_and_says_how_to_end_it(
    api: ApiServer, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("--procs", "1", "--no-wait", "train.py") == 0
    err = capfd.readouterr().err
    (jobset,) = api.find("jobsets")
    assert f"`kubectl delete jobsets/{jobset['metadata']['name']} -n teams`" in err
    (secret,) = api.find("secrets")
    assert secret["metadata"]["ownerReferences"][0]["uid"] == jobset["metadata"]["uid"]
    assert len(secret["stringData"]["PACELINE_RUN_SECRET"]) == 64


@pytest.mark.parametrize("event", [True, False])
def test_somebody_else_deletes_the_run(
    api: ApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str], event: bool
) -> None:
    """The launcher hears of it also where no watch has seen it: before the first one, or between two."""

    def run(pod: Pod) -> int:
        if pod.number == 0:
            with api.lock:
                api.remove("jobsets", "teams", api.find("jobsets")[0]["metadata"]["name"])
                if not event:
                    api.forget()
        return 143 * pod.asked_to_end.wait(1)

    with Controllers(api, tmp_path, run):
        assert launch("--procs", "1", "train.py") == 1
    assert "somebody has deleted jobsets/train-" in capfd.readouterr().err
    assert [left for left in api.left() if not left.startswith("pods")] == []


# -- bad input ---------------------------------------------------------------------------------------------------


def refused(api: ApiServer, capfd: pytest.CaptureFixture[str], code: str, *words: str) -> str:
    """What is said where nothing was made, or nothing is left."""
    assert launch(*words, "train.py") in (1, 2)
    out, err = capfd.readouterr()
    assert f"[{code}]" in err, err
    assert out == "" and api.left() == []
    return err


def test_no_cluster_answers(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    text = Path(api.kubeconfig).read_text().replace(str(api.port), "1")
    (tmp_path / "other").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "other"))
    err = refused(api, capfd, "kubernetes-unreachable", "--procs", "1")
    assert "https://127.0.0.1:1" in err and "context here of" in err
    err = refused(api, capfd, "kubernetes-unreachable", "--procs", "1", "--kube-context", "distrustful")
    monkeypatch.setenv("KUBECONFIG", api.kubeconfig)
    err = refused(api, capfd, "kubernetes-unreachable", "--procs", "1", "--kube-context", "distrustful")
    assert "certificate verify failed" in err


def test_no_kubeconfig(api: ApiServer, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert "/nowhere (KUBECONFIG)" in refused(api, capfd, "kubernetes-config", "--procs", "1")
    monkeypatch.setenv("KUBECONFIG", api.kubeconfig)
    assert "moon" in refused(api, capfd, "kubernetes-config", "--procs", "1", "--kube-context", "moon")


def test_a_user_that_the_cluster_does_not_know(api: ApiServer, capfd) -> None:
    refused(api, capfd, "kubernetes-login", "--procs", "1", "--kube-context", "stranger")


def test_verbs_that_the_user_lacks_are_named_before_anything_is_made(api: ApiServer, capfd) -> None:
    api.denied = {("create", "secrets"), ("get", "pods/log"), ("create", "jobsets"), ("list", "nodes")}
    err = refused(api, capfd, "kubernetes-forbidden", "--gpus", "8")
    assert "create jobsets.jobset.x-k8s.io; create secrets; get pods/log" in err
    assert not any(method == "POST" and "review" not in path for method, path in api.requests)


def test_a_refusal_half_way_leaves_nothing(api: ApiServer, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline_hosts.launchers.kubernetes.client import Cluster

    monkeypatch.setattr(Cluster, "may", lambda *_: True)  # an admission rule that no review knows of
    api.denied = {("create", "secrets")}
    err = refused(api, capfd, "kubernetes-forbidden", "--procs", "1")
    assert "create secrets" in err and 'User "jane" cannot create' in err


def test_an_answer_that_does_not_arrive_leaves_nothing(api: ApiServer, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline_hosts.launchers.kubernetes.client import Cluster
    from paceline_hosts.launchers.kubernetes.refusals import unreachable

    create = Cluster.create

    def answered_too_late(cluster, resource, manifest):
        made = create(cluster, resource, manifest)
        if resource.plural == "secrets":
            raise unreachable("h", "s", TimeoutError("read timed out"))
        return made

    monkeypatch.setattr(Cluster, "create", answered_too_late)
    refused(api, capfd, "kubernetes-unreachable", "--procs", "1")


def test_what_cannot_be_deleted_is_told(api: ApiServer, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline_hosts.launchers.kubernetes.client import Cluster

    monkeypatch.setattr(Cluster, "may", lambda *_: True)
    api.denied = {("delete", "configmaps")}
    api.on_change.append(lambda event, plural, o: o)
    with Controllers(api, tmp_path, greet):
        assert launch("--procs", "1", "train.py") == 0
    err = capfd.readouterr().err
    assert "[kubernetes-left]" in err and "kubectl delete configmaps/train-" in err


def test_a_namespace_that_is_not_there(api: ApiServer, capfd) -> None:
    assert "'moon'" in refused(api, capfd, "kubernetes-namespace", "--procs", "1", "--namespace", "moon")
    api.denied = {("get", "namespaces")}
    refused(api, capfd, "kubernetes-namespace", "--procs", "1", "--namespace", "moon")


def test_a_queue_that_is_not_there(api: ApiServer, capfd) -> None:
    api.put("localqueues", {"metadata": {"name": "gpus", "namespace": "teams"}})
    assert "there are: gpus" in refused(api, capfd, "kubernetes-queue", "--procs", "1", "--queue", "gpu")
    api.groups.remove("kueue.x-k8s.io/v1beta1")
    assert "the cluster has no Kueue" in refused(api, capfd, "kubernetes-queue", "--procs", "1", "--queue", "gpus")


def test_more_gpus_than_any_node_has(api: ApiServer, tmp_path: Path, capfd) -> None:
    err = refused(api, capfd, "kubernetes-gpus", "--gpus", "16")
    assert "large has 8, small has 2" in err and "--gpus 8 or less" in err
    # All problems at once.
    err = refused(api, capfd, "kubernetes-queue", "--gpus", "16", "--queue", "q")
    assert "[kubernetes-gpus]" in err
    (tmp_path / "v.yaml").write_text("gpu: amd.com/gpu\n")
    with Controllers(api, tmp_path, greet):
        assert launch("--gpus", "16", "--values", "v.yaml", "train.py") == 0
    assert "no node has amd.com/gpu now" in capfd.readouterr().err


def test_a_kind_that_the_cluster_has_not(api: ApiServer, capfd) -> None:
    api.groups.remove("trainer.kubeflow.org/v1alpha1")
    err = refused(api, capfd, "kubernetes-kind", "--procs", "1", "--kind", "trainjob")
    assert "--kind jobset, which the cluster has" in err


def test_a_field_that_the_cluster_lacks(api: ApiServer, capfd) -> None:
    api.lacks = {"spec.failurePolicy"}
    err = refused(api, capfd, "kubernetes-manifest", "--procs", "1")
    assert 'unknown field "spec.failurePolicy"' in err
    api.lacks, api.invalid = set(), {"jobsets": ("spec.failurePolicy.rules[0].action", "Unsupported value")}
    err = refused(api, capfd, "kubernetes-manifest", "--procs", "1")
    assert "spec.failurePolicy.rules[0].action: Unsupported value" in err


def test_an_object_that_is_there_already(api: ApiServer, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_hosts.launchers.kubernetes.run.name_of", lambda *_: "train-1")
    api.put("jobsets", {"metadata": {"name": "train-1", "namespace": "teams"}})
    assert launch("--procs", "1", "train.py") == 1
    assert "[kubernetes-conflict]" in capfd.readouterr().err
    assert api.left() == ["jobsets/train-1"], "what somebody else has made stays"


def test_no_image(api: ApiServer, capfd) -> None:
    assert cli.main(["launch", "--on", "kubernetes", "--nodes", "2", "--procs", "1", "train.py"]) == 2
    assert "[kubernetes-image]" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("state", "code", "said"),
    [
        ({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}, "kubernetes-image", "ImagePullBackOff"),
        ({"waiting": {"reason": "InvalidImageName", "message": "no"}}, "kubernetes-image", "InvalidImageName"),
        (
            {"terminated": {"reason": "StartError", "exitCode": 128, "message": "no python3"}},
            "kubernetes-image",
            "no python3",
        ),
        (
            {"terminated": {"exitCode": 127, "message": "paceline: this image has no paceline for /usr/bin/python3"}},
            "kubernetes-image",
            "has no paceline",
        ),
        (
            {"waiting": {"reason": "CreateContainerConfigError", "message": "no such claim"}},
            "kubernetes-pod",
            "no such claim",
        ),
    ],
)
def test_pods_that_never_start(
    api: ApiServer, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch, state, code: str, said: str
) -> None:
    monkeypatch.setattr(follow, "_MAY_PASS_S", dict.fromkeys(follow._MAY_PASS_S, 0.5))
    with Controllers(api, tmp_path, greet) as controllers:
        controllers.starting = state
        assert launch("--procs", "1", "train.py") == 1
        until(lambda: api.left() == [], "an empty cluster")
    err = capfd.readouterr().err
    assert f"[{code}]" in err and said in err


def test_a_cluster_that_falls_silent(api: ApiServer, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_hosts.launchers.kubernetes.follow._PATIENCE_S", 1.0)
    ended = threading.Event()

    def reads_everything() -> bool:
        paths = [path for _, path in list(api.requests)]
        return sum("watch=true" in path for path in paths) >= 2 and any("/log?" in path for path in paths)

    def run(pod: Pod) -> int:
        if pod.number == 0:
            # Not while the launcher makes its objects: it would give up at once, which is another case. And not while it
            # connects: a server that ends then leaves the thread that reads waiting for its answer.
            until(reads_everything, "two watches and a log")
            threading.Thread(target=api.__exit__).start()
        return int(ended.wait(20))

    with Controllers(api, tmp_path, run):
        assert launch("--procs", "1", "train.py") == 1
        ended.set()
    err = capfd.readouterr().err
    assert "[kubernetes-lost]" in err and "kubectl delete jobsets train-" in err


def test_typos_in_the_values_file(api: ApiServer, tmp_path: Path, capfd) -> None:
    (tmp_path / "v.yaml").write_text("shm: 1Gi\nnodeSelectr: {pool: a}\ntolerations: {key: a}\nshm: 2Gi\nmoon: 1\n")
    err = refused(api, capfd, "kubernetes-values", "--procs", "1", "--values", "v.yaml")
    for told in (
        "v.yaml:2: there is no key 'nodeSelectr'",
        "write nodeSelector",
        "v.yaml:3: tolerations has a value of",
        "v.yaml:4 sets shm a second",
        "v.yaml:5",
    ):
        assert told in err
    assert api.requests == []
    for text, told in (("- a\n", "holds no keys"), ("a: [\n", "is not YAML"), ("a: !!python/none x\n", "is not YAML")):
        (tmp_path / "v.yaml").write_text(text)
        assert told in refused(api, capfd, "kubernetes-values", "--procs", "1", "--values", "v.yaml")
    assert "cannot be read" in refused(api, capfd, "kubernetes-values", "--procs", "1", "--values", "none.yaml")
    (tmp_path / "v.yaml").write_text("")
    assert launch("--procs", "1", "--values", "v.yaml", "--dry-run", "train.py") == 0


def test_settings_of_this_launcher_need_it(api: ApiServer, capfd) -> None:
    assert cli.main(["launch", "--namespace", "teams", "train.py"]) == 2
    assert "say --on kubernetes" in capfd.readouterr().err


def test_a_script_that_cannot_go_along(api: ApiServer, tmp_path: Path, capfd) -> None:
    assert "is no file" not in refused(api, capfd, "kubernetes-manifest", "--procs", "1") if api.lacks else True
    words = ["launch", "--on", "kubernetes", "--image", "i", "--procs", "1", "--script-from", "here", "-m", "train"]
    assert cli.main(words) == 2
    err = capfd.readouterr().err
    assert "[kubernetes-script]" in err and "a module is no file" in err
    words[-2:] = ["none.py"]
    assert cli.main(words) == 2
    assert "there is no file" in capfd.readouterr().err


def test_which_scripts_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline_hosts.launchers.kubernetes.run import script_to_send

    monkeypatch.chdir(tmp_path)
    (tmp_path / "alone.py").write_text("import os, json.decoder\nfrom torch import nn\n")
    (tmp_path / "model.py").write_text("")
    (tmp_path / "both.py").write_text("from model import Model\n")
    (tmp_path / "broken.py").write_text("def")
    assert script_to_send("script", "alone.py", "auto")[0].startswith("import os")
    assert script_to_send("script", "both.py", "auto") == ("", "it imports model beside it")
    assert script_to_send("script", "both.py", "here")[0].startswith("from model")
    assert script_to_send("script", "broken.py", "auto") == ("def", "")
    for name, why in (("none.py", "there is no file"), ("/app/train.py", "absolute"), ("x/alone.py", "no file")):
        text, reason = script_to_send("script", name, "auto")
        assert text == "" and why in reason, "it is in the image"
    assert script_to_send("script", "alone.py", "image")[0] == script_to_send("module", "alone", "auto")[0] == ""


def test_a_script_that_is_not_here_has_to_be_in_the_image(api: ApiServer, tmp_path: Path, capfd) -> None:
    assert launch("--procs", "1", "--dry-run", "trian.py") == 0
    assert f"# trian.py has to be in the image: there is no file {tmp_path}/trian.py." in capfd.readouterr().out


def test_the_client_is_an_extra(api: ApiServer, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert "pip install kubernetes" in refused(api, capfd, "kubernetes-client", "--procs", "1")
    assert launch("--procs", "1", "--dry-run", "train.py") == 0, "manifests need none"


@pytest.mark.parametrize(
    ("status", "body", "code", "said"),
    [
        (500, b'{"message": "etcdserver: request timed out"}', "kubernetes-api", "etcdserver"),
        (502, b"<html>Bad Gateway</html>", "kubernetes-api", "Bad Gateway"),
        (403, b'{"message": "exceeded quota: gpus"}', "kubernetes-forbidden", "exceeded quota"),
        (404, b'{"message": "the server could not find the requested resource"}', "kubernetes-api", "GET /x: 404"),
        (
            422,
            b'{"message": "m", "details": {"causes": [{"field": "spec.a", "message": "no"}]}}',
            "kubernetes-manifest",
            "spec.a: no",
        ),
        (422, b'{"message": "m", "details": null}', "kubernetes-manifest", "m"),
    ],
)
def test_what_a_server_answers(status: int, body: bytes, code: str, said: str) -> None:
    from paceline_hosts.launchers.kubernetes.refusals import Refusal

    problem = Refusal.of(status, body, "GET", "/x").problem("teams")
    assert problem.code == code and said in str(problem)


def test_settings_become_flags_of_the_command_in_the_pod() -> None:
    from paceline.config import schema
    from paceline.config.sources import resolve_launch
    from paceline_hosts.launchers.kubernetes.run import OF_SUBMISSION, forwarded_to_pods, variables_of
    from paceline_hosts.launchers.launch_flags import flags_of

    parser = argparse.ArgumentParser()
    schema.add_options(parser)
    said = "--on kubernetes --image i --gpus 2 --nodes 2 --cpu --no-debug --shard 4 --option shard.reshard=no --tee 1"
    said += " --grace-s 5"
    env = {"PACELINE_MIXED_PRECISION": "bf16"}
    given = resolve_launch(schema.given(parser.parse_args(said.split())), env, search=False)
    words = flags_of(given, OF_SUBMISSION)
    again = resolve_launch(schema.given(parser.parse_args(words)), {}, search=False)
    assert again.run == given.run
    assert (again.launch.grace_s, again.launch.tee, again.launch.nodes, again.launch.launcher) == (5, "1", 1, "ssh")
    assert "--no-debug" in words and "bf16" in words
    assert variables_of(given)["PYTHONUNBUFFERED"] == "1" and "PACELINE_SETTINGS" not in variables_of(given)
    env = {
        "PACELINE_SHARD": "2",
        "PACELINE_RUN_SECRET_FILE": "f",
        "PYTHONPATH": "/here",
        "NCCL_DEBUG": "INFO",
        "PACELINE_LOG_LEVEL": "x",
    }
    assert forwarded_to_pods(env) == {"NCCL_DEBUG": "INFO", "PACELINE_LOG_LEVEL": "x"}


def test_what_would_have_no_effect_is_refused(api: ApiServer, capfd) -> None:
    words = ("--procs", "1", "--main-address", "a", "--launcher-args", "-F x", "--nodes", "1:3")
    err = refused(api, capfd, "host-flags", *words)
    assert "main_address has no meaning" in err and "launcher_args has" in err and "cannot be a range" in err


def test_names_of_runs() -> None:
    from paceline_hosts.launchers.kubernetes.run import name_of

    for target in ("train.py", "src/My_Train.py", "1.py", "a" * 90, "package.module", "___", "日本.py"):
        name = name_of(target, "secret")
        assert re.fullmatch(r"[a-z][-a-z0-9]{0,38}[a-z0-9]", name), name
    assert name_of("train.py", "a") != name_of("train.py", "b")
    assert name_of("src/My_Train.py", "s").startswith("my-train-")
