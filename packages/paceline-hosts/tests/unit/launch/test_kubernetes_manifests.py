"""The manifests of each kind, against the schemas that their projects publish, and what each says of failures."""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_schemas
import pytest
import yaml

from paceline_hosts.launchers.kubernetes.document import document
from paceline_hosts.launchers.kubernetes.kinds import KINDS
from paceline_hosts.launchers.kubernetes.kinds.kind import PODS, WorkloadKind
from paceline_hosts.launchers.kubernetes.pod import selector
from paceline_hosts.launchers.kubernetes.run import PodRun
from paceline_hosts.launchers.kubernetes.values import ManifestValues

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: `make setup`")
pytest.importorskip("kubeflow_trainer_api", reason="needs kubeflow-trainer-api: `make setup`")
RUN = PodRun(
    name="train-0a1b2",
    namespace="teams",
    image="registry.local/train:1",
    nodes=2,
    procs=8,
    gpus=8,
    words=("launch", "--mixed-precision", "bf16", "/paceline/script/train.py", "--lr", "0.1"),
    env={"PYTHONUNBUFFERED": "1"},
    secrets={"PACELINE_RUN_SECRET": "nobody reads this", "MLFLOW_TRACKING_PASSWORD": "nor this"},
    tls={"tls.crt": "a certificate", "tls.key": "nobody reads this either"},
    script="print('hello')\n",
    script_name="train.py",
    max_restarts=3,
    queue="gpus",
    values=ManifestValues(
        shm="16Gi",
        resources={"memory": "200Gi", "rdma/hca": "1"},
        labels={"team": "vision"},
        annotations={"k8s.v1.cni.cncf.io/networks": "rdma"},
        container={
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            "volumeMounts": [{"name": "ckpt", "mountPath": "/ckpt"}],
        },
        pod={
            "nodeSelector": {"pool": "a100"},
            "volumes": [{"name": "ckpt", "persistentVolumeClaim": {"claimName": "runs"}}],
        },
    ),
)
ALONE = PodRun(name="run-1", namespace="", image="i", nodes=1, procs=1, gpus=0, words=("launch", "t.py"))


def objects(kind: WorkloadKind, run: PodRun) -> list[dict[str, Any]]:
    return (
        [manifest for _, manifest in kind.before(run)]
        + [kind.main(run)]
        + [manifest for _, manifest in kind.beside(run)]
    )


def check(manifest: dict[str, Any]) -> None:
    """Raises where the published schema of the manifest's kind does not have a field, or has it otherwise."""
    from kubeflow_trainer_api import models

    own = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }
    if manifest["kind"] in ("JobSet", "PyTorchJob"):
        assert manifest["apiVersion"] == {"JobSet": "jobset.x-k8s.io/v1alpha2"}.get(manifest["kind"], "kubeflow.org/v1")
        kubernetes_schemas.check_spec(manifest["kind"], manifest["spec"])
    if manifest["kind"] == "TrainingRuntime":
        kubernetes_schemas.check_spec("JobSet", manifest["spec"]["template"]["spec"])
    if manifest["kind"] in own:
        # A key that a model does not know is dropped without a word, so what comes back is compared.
        assert own[manifest["kind"]].from_dict(manifest).to_dict() == manifest
    elif manifest["kind"] != "PyTorchJob":
        kubernetes_validate.validate(manifest, "1.37", strict=True)


@pytest.mark.parametrize("run", [RUN, ALONE], ids=["all", "least"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_each_manifest_fits_its_schema(kind: WorkloadKind, run: PodRun) -> None:
    for manifest in objects(kind, run):
        check(manifest)
    for template in templates(kind, run):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "p", **template["metadata"]},
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, "1.37", strict=True)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_misspelt_field_would_be_found(kind: WorkloadKind) -> None:
    manifest = kind.main(RUN)
    manifest["spec"]["sucessPolicy"] = {}
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        check(manifest)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("jobset", ("failurePolicy", "rules", 0, "action")),
        ("jobset", ("failurePolicy", "rules", 0, "onJobFailureReasons", 0)),
        ("jobset", ("successPolicy", "operator")),
        ("pytorchjob", ("runPolicy", "cleanPodPolicy")),
        ("pytorchjob", ("pytorchReplicaSpecs", "Worker", "restartPolicy")),
    ],
)
def test_a_misspelt_word_would_be_found(kind: str, path: tuple[str | int, ...]) -> None:
    manifest = KINDS[kind].main(RUN)
    place = manifest["spec"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = "Restrat"
    with pytest.raises(jsonschema.ValidationError, match="Restrat"):
        check(manifest)


def templates(kind: WorkloadKind, run: PodRun) -> list[dict[str, Any]]:
    """The pod templates in the manifests of a run."""
    if kind.name == "pytorchjob":
        return [replica["template"] for replica in kind.main(run)["spec"]["pytorchReplicaSpecs"].values()]
    if kind.name == "job":
        return [kind.main(run)["spec"]["template"]]
    if kind.name == "trainjob":
        jobset = kind.before(run)[0][1]["spec"]["template"]["spec"]
    else:
        jobset = kind.main(run)["spec"]
    return [jobset["replicatedJobs"][0]["template"]["spec"]["template"]]


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_what_a_pod_gets(kind: WorkloadKind) -> None:
    for template in templates(kind, RUN):
        (container,) = template["spec"]["containers"]
        assert container["name"] == kind.container
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "200Gi", "rdma/hca": "1"}
        assert container["args"] == list(RUN.words)
        assert container["envFrom"] == [{"secretRef": {"name": RUN.name}}]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {"/dev/shm": "shm", "/paceline/script": "script", "/paceline/tls": "tls", "/ckpt": "ckpt"}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes["tls"]["secret"] == {"secretName": f"{RUN.name}-tls"}
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
        assert volumes["ckpt"]["persistentVolumeClaim"] == {"claimName": "runs"}
        assert template["spec"]["nodeSelector"] == {"pool": "a100"}
        # 30 s of grace for the processes, and some for their launcher
        assert template["spec"]["terminationGracePeriodSeconds"] == 45
        labels = template["metadata"]["labels"]
        assert labels["team"] == "vision"
        assert all(labels[pair.partition("=")[0]] == pair.partition("=")[2] for pair in selector(RUN).split(","))
    (alone, *_) = templates(kind, ALONE)
    assert "resources" not in alone["spec"]["containers"][0]


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_secrets_stand_in_the_secret_alone(kind: WorkloadKind) -> None:
    for manifest in objects(kind, RUN):
        if manifest["kind"] != "Secret":
            assert "nobody reads this" not in yaml.safe_dump(manifest)
    text = document(RUN, kind)
    assert "nobody reads this" not in text and "nor this" not in text
    assert "MLFLOW_TRACKING_PASSWORD, PACELINE_RUN_SECRET" in text
    kinds = [manifest["kind"] for manifest in yaml.safe_load_all(text)]
    assert kind.kind in kinds and "Secret" not in kinds


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_the_printed_manifests_are_the_ones_that_are_made(kind: WorkloadKind) -> None:
    printed = list(yaml.safe_load_all(document(RUN, kind)))
    assert printed == [manifest for manifest in objects(kind, RUN) if manifest["kind"] != "Secret"]


def test_torchrun_variables_name_pod_0() -> None:
    addresses = {}
    for name in ("jobset", "job"):
        (template,) = templates(KINDS[name], RUN)
        env = {entry["name"]: entry.get("value") for entry in template["spec"]["containers"][0]["env"]}
        assert (env["PET_NNODES"], env["PET_NPROC_PER_NODE"], env["PET_MASTER_PORT"]) == ("2", "8", "29500")
        addresses[name] = env["PET_MASTER_ADDR"]
    # As the controllers name pods: JOBSET-REPLICATEDJOB-JOB-POD.SUBDOMAIN, and JOB-POD.SUBDOMAIN.
    assert addresses == {"jobset": "train-0a1b2-node-0-0.train-0a1b2", "job": "train-0a1b2-0.train-0a1b2"}
    service = next(manifest for manifest in objects(KINDS["job"], RUN) if manifest["kind"] == "Service")
    (template,) = templates(KINDS["job"], RUN)
    assert template["spec"]["subdomain"] == service["metadata"]["name"] == "train-0a1b2"
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    # The operators of the others set these, and refuse manifests that do.
    for name in ("trainjob", "pytorchjob"):
        text = yaml.safe_dump_all(objects(KINDS[name], RUN))
        assert "PET_" not in text


def test_a_lost_pod_restarts_its_set_and_75_counts_as_nothing() -> None:
    for name, spec in (
        ("jobset", KINDS["jobset"].main(RUN)["spec"]),
        ("trainjob", KINDS["trainjob"].before(RUN)[0][1]["spec"]["template"]["spec"]),
    ):
        job = spec["replicatedJobs"][0]["template"]["spec"]
        assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (2, 2, 0), name
        assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["FailJob", "FailJob"]
        assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [75]
        policy = spec["failurePolicy"]
        assert policy["maxRestarts"] == 3
        assert policy["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
        assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = KINDS["job"].main(RUN)["spec"]
    assert job["backoffLimit"] == 6, "a restart of the run is a failure of both pods"
    assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["Ignore", "Ignore"]
    train = KINDS["pytorchjob"].main(RUN)["spec"]
    assert train["runPolicy"]["backoffLimit"] == 7
    assert train["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
    assert train["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == "OnFailure"
    assert "restartPolicy" not in train["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert "Worker" not in KINDS["pytorchjob"].main(ALONE)["spec"]["pytorchReplicaSpecs"]
    assert KINDS["pytorchjob"].main(ALONE)["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_kueue_finds_its_queue(kind: WorkloadKind) -> None:
    assert kind.main(RUN)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert "kueue.x-k8s.io/queue-name" not in kind.main(ALONE)["metadata"]["labels"]
    assert kind.main(RUN)["metadata"]["namespace"] == "teams"
    assert "namespace" not in kind.main(ALONE)["metadata"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_how_the_end_is_read(kind: WorkloadKind) -> None:
    def status(*types: str) -> dict[str, Any]:
        return {"status": {"conditions": [{"type": type_, "status": "True", "message": "m"} for type_ in types]}}

    assert not kind.state({}).ended and not kind.state(status("Running")).ended
    good = kind.state(status("Running", kind.succeeded))
    assert good.ended and not good.failed
    bad = kind.state(status("Failed"))
    assert bad.ended and bad.failed and bad.message == "m"
    assert not kind.state({"status": {"conditions": [{"type": kind.failed, "status": "False"}]}}).ended


def test_the_number_of_a_node() -> None:
    index = {"metadata": {"annotations": {"batch.kubernetes.io/job-completion-index": "3"}}}
    assert KINDS["jobset"].node_of(index) == KINDS["job"].node_of(index) == 3
    kubeflow = "training.kubeflow.org/replica-"
    master = {"metadata": {"labels": {f"{kubeflow}type": "master", f"{kubeflow}index": "0"}}}
    worker = {"metadata": {"labels": {f"{kubeflow}type": "worker", f"{kubeflow}index": "1"}}}
    assert [KINDS["pytorchjob"].node_of(pod) for pod in (master, worker)] == [0, 2]


def test_paths() -> None:
    assert PODS.path("teams", "p") == "/api/v1/namespaces/teams/pods/p"
    assert KINDS["jobset"].resource.path("teams") == "/apis/jobset.x-k8s.io/v1alpha2/namespaces/teams/jobsets"
