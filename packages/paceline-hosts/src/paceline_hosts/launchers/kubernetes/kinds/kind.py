"""`WorkloadKind` describes how one kind of Kubernetes object runs a run: its manifests, and how its status is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline_hosts.launchers.kubernetes.pod import Manifest, config_map, main_metadata, secret, tls_secret
from paceline_hosts.launchers.kubernetes.run import PodRun


@dataclass(frozen=True)
class Resource:
    """Names a kind of object in the API.

    Attributes:
        group: the API group; "" for the core group.
        version: the version of the group.
        plural: the name of the kind in paths.
    """

    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """The group and version, as a manifest writes them."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "") -> str:
        """Returns the path of one object, or of all objects in a namespace if no name is given."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        path = f"{root}/namespaces/{namespace}/{self.plural}"
        return f"{path}/{name}" if name else path


PODS = Resource("", "v1", "pods")
SECRETS = Resource("", "v1", "secrets")
CONFIG_MAPS = Resource("", "v1", "configmaps")
SERVICES = Resource("", "v1", "services")


@dataclass(frozen=True)
class WorkloadState:
    """Holds whether a run has ended, and why.

    Attributes:
        ended: whether it has ended.
        failed: whether it has failed.
        reason, message: of the condition that the controller has set.
    """

    ended: bool = False
    failed: bool = False
    reason: str = ""
    message: str = ""


class WorkloadKind:
    """Renders the objects of a run, and reads their status. Each kind is a subclass.

    Attributes:
        name: its name for `--kind`.
        kind: its name in manifests.
        resource: the resource of the main object, whose controller creates the pods.
        container: the name that its controller expects for the container.
        succeeded, failed: the types of the two conditions that end a run.
    """

    name: str
    kind: str
    resource: Resource
    container: str = "node"
    succeeded: str = "Complete"
    failed: str = "Failed"

    def main(self, run: PodRun) -> Manifest:
        """Returns the main object, whose controller creates the pods."""
        return {
            "apiVersion": self.resource.api_version,
            "kind": self.kind,
            "metadata": main_metadata(run),
            "spec": self.spec(run),
        }

    def spec(self, run: PodRun) -> Manifest:
        """Returns the specification of the main object."""
        raise NotImplementedError

    def before(self, run: PodRun) -> list[tuple[Resource, Manifest]]:
        """Returns the objects that the main object refers to, so they are created before it."""
        return []

    def beside(self, run: PodRun) -> list[tuple[Resource, Manifest]]:
        """Returns the objects that the main object owns, so the cluster deletes them with it."""
        objects = [(SECRETS, secret(run))]
        if run.tls:
            objects.append((SECRETS, tls_secret(run)))
        if run.script:
            objects.append((CONFIG_MAPS, config_map(run)))
        return objects

    def state(self, manifest: Mapping[str, Any]) -> WorkloadState:
        """Reads the status of the main object."""
        conditions = manifest.get("status", {}).get("conditions") or ()
        for condition in conditions:
            is_end = condition.get("type") in (self.succeeded, self.failed)
            if is_end and condition.get("status") == "True":
                has_failed = condition["type"] == self.failed
                return WorkloadState(True, has_failed, condition.get("reason", ""), condition.get("message", ""))
        return WorkloadState()

    def node_of(self, pod: Mapping[str, Any]) -> int:
        """Returns the number of the node that a pod is; a Job writes it into an annotation, or into a label."""
        metadata = pod["metadata"]
        key = "batch.kubernetes.io/job-completion-index"
        index = metadata.get("annotations", {}).get(key) or metadata.get("labels", {}).get(key)
        return int(index or 0)
