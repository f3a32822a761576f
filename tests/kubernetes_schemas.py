"""Schemas of JobSet (jobset.x-k8s.io/v1alpha2) and PyTorchJob (kubeflow.org/v1), written by hand from their API types.

No package has them that could be installed beside the client: kubeflow-training (PyTorchJob) wants an older one, and
kubeflow-trainer-api's models of JobSet know its fields, and neither which of them are required nor which words they take.

A pod template or a Job inside of them is only `{"type": "object"}`: the tests check these as pods and Jobs of Kubernetes.
"""

from __future__ import annotations

from typing import Any

import jsonschema

TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
FLAG = {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 0}
ANYTHING = {"type": "object"}


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _words(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(words)}


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


_RULE = _object(
    "name action",
    name={"type": "string", "maxLength": 128, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action=_words(
        "FailJobSet",
        "RestartJobSet",
        "RestartJobSetAndIgnoreMaxRestarts",
        "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
    ),
    onJobFailureReasons=_list(
        _words(
            "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"
        )
    ),
    onJobFailureMessagePatterns=TEXTS,
    targetReplicatedJobs=TEXTS,
)
_REPLICATED_JOB = _object(
    "name template",
    name=TEXT,
    groupName=TEXT,
    replicas=COUNT,
    template=_object("spec", metadata=ANYTHING, spec=ANYTHING),
    dependsOn=_list(_object("name status", name=TEXT, status=_words("Ready", "Complete"))),
)
_JOB_SET = _object(
    "",
    replicatedJobs=_list(_REPLICATED_JOB),
    network=_object("", enableDNSHostnames=FLAG, subdomain=TEXT, publishNotReadyAddresses=FLAG),
    successPolicy=_object("operator", operator=_words("All", "Any"), targetReplicatedJobs=TEXTS),
    failurePolicy=_object(
        "",
        maxRestarts=COUNT,
        restartStrategy=_words("Recreate", "BlockingRecreate", "InPlaceRestart"),
        rules=_list(_RULE),
    ),
    startupPolicy=_object("startupPolicyOrder", startupPolicyOrder=_words("AnyOrder", "InOrder")),
    suspend=FLAG,
    coordinator=_object("replicatedJob", replicatedJob=TEXT, jobIndex=COUNT, podIndex=COUNT),
    managedBy=TEXT,
    ttlSecondsAfterFinished=COUNT,
    volumeClaimPolicies=_list(ANYTHING),
)
_REPLICA = _object(
    "", replicas=COUNT, template=ANYTHING, restartPolicy=_words("Always", "OnFailure", "Never", "ExitCode")
)
_PYTORCH_JOB = _object(
    "pytorchReplicaSpecs",
    runPolicy=_object(
        "",
        cleanPodPolicy=_words("", "All", "Running", "None"),
        ttlSecondsAfterFinished=COUNT,
        activeDeadlineSeconds=COUNT,
        backoffLimit=COUNT,
        schedulingPolicy=ANYTHING,
        suspend=FLAG,
        managedBy=TEXT,
    ),
    elasticPolicy=ANYTHING,
    pytorchReplicaSpecs=_object("", Master=_REPLICA, Worker=_REPLICA),
    nprocPerNode=TEXT,
)


def check_spec(kind: str, spec: object) -> None:
    """Raises `jsonschema.ValidationError` where the specification of a JobSet or a PyTorchJob does not fit.

    Args:
        kind: "JobSet" or "PyTorchJob".
        spec: what stands under `spec` in its manifest.
    """
    jsonschema.validate(spec, {"JobSet": _JOB_SET, "PyTorchJob": _PYTORCH_JOB}[kind])
