"""Settings that `paceline launch --on kubernetes` takes in addition to those of all launchers."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.kinds import matching, one_of
from paceline.config.settings import setting

_GROUP = "Kubernetes"


@dataclass(frozen=True)
class KubernetesSettings:
    """Settings of jobs that Kubernetes runs."""

    image: str | None = setting(
        None, matching(r"\S+", "an image", "IMAGE"), "Container image of the pods; it must contain Paceline.", _GROUP
    )
    kind: str = setting(
        "auto", one_of("auto", "jobset", "trainjob", "pytorchjob", "job"),
        "Kind of object that is created; auto: the first of these that the cluster supports.", _GROUP,
    )  # fmt: skip
    namespace: str | None = setting(
        None, matching(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "a name of small letters, digits and -", "NAME"),
        "Namespace of the run; not set: that of the context in the kubeconfig file.", _GROUP,
    )  # fmt: skip
    kube_context: str | None = setting(
        None, matching(r".+", "a name", "NAME"), "Context in the kubeconfig file; not set: the current one.", _GROUP
    )
    queue: str | None = setting(
        None, matching(r"\S+", "a name", "NAME"), "Queue of Kueue (a LocalQueue) in which the run waits.", _GROUP
    )
    values: str | None = setting(
        None, matching(r".+", "a file", "FILE"),
        "File with further fields of the pods: volumes, /dev/shm, resources, node selectors.", _GROUP,
    )  # fmt: skip
    script_from: str = setting(
        "auto", one_of("auto", "here", "image"),
        "Where the script comes from: sent from here, or in the image; auto: a file of this folder that imports no other "
        "file of it is sent.", _GROUP,
    )  # fmt: skip


SETTINGS = KubernetesSettings
