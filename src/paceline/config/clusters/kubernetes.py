"""What `paceline launch --on kubernetes` is told on top of the settings of all launchers."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.kinds import matching, one_of
from paceline.config.settings import setting

_GROUP = "Kubernetes"


@dataclass(frozen=True)
class KubernetesSettings:
    """Settings of jobs that Kubernetes runs."""

    image: str | None = setting(
        None, matching(r"\S+", "an image", "IMAGE"), "Container image that the pods run; it contains Paceline.", _GROUP
    )
    kind: str = setting(
        "auto", one_of("auto", "jobset", "trainjob", "pytorchjob", "job"),
        "What is made in the cluster; auto: the first of these that it has.", _GROUP,
    )  # fmt: skip
    namespace: str | None = setting(
        None, matching(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "a name of small letters, digits and -", "NAME"),
        "Namespace of the run; not set: that of the kubeconfig file's context.", _GROUP,
    )  # fmt: skip
    kube_context: str | None = setting(
        None, matching(r".+", "a name", "NAME"), "Context of the kubeconfig file; not set: its current one.", _GROUP
    )
    queue: str | None = setting(
        None, matching(r"\S+", "a name", "NAME"), "Queue of Kueue (a LocalQueue) that the run waits in.", _GROUP
    )
    values: str | None = setting(
        None, matching(r".+", "a file", "FILE"),
        "File with what the pods need besides: volumes, /dev/shm, resources, node selectors.", _GROUP,
    )  # fmt: skip
    script_from: str = setting(
        "auto", one_of("auto", "here", "image"),
        "Where the script is: sent from here, or in the image; auto: a file of this folder that imports no neighbour is "
        "sent.", _GROUP,
    )  # fmt: skip


SETTINGS = KubernetesSettings
