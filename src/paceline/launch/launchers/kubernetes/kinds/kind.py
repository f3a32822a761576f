"""What a kind of run says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.launch.launchers.kubernetes.pod import Manifest, config_map, main_metadata, secret, tls_secret
from paceline.launch.launchers.kubernetes.run import PodRun


@dataclass(frozen=True)
class Resource:
    """A kind of object, as the API addresses it.

    Attributes:
        group: its API group; "" for the core's.
        version: of that group.
        plural: its name in paths.
    """

    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """As a manifest writes it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "") -> str:
        """Where the API has it."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{namespace}/{self.plural}{f'/{name}' if name else ''}"


PODS = Resource("", "v1", "pods")
SECRETS = Resource("", "v1", "secrets")
CONFIG_MAPS = Resource("", "v1", "configmaps")
SERVICES = Resource("", "v1", "services")


@dataclass(frozen=True)
class State:
    """Whether a run goes on, and why not.

    Attributes:
        ended: whether it has ended.
        failed: whether it has failed.
        reason, message: what the controller says.
    """

    ended: bool = False
    failed: bool = False
    reason: str = ""
    message: str = ""


class Kind:
    """A kind of run; a subclass says how it is rendered.

    Attributes:
        name: what `--kind` calls it.
        kind: as a manifest writes it.
        resource: of the object that makes the pods.
        container: name of the container that it expects.
        succeeded, failed: types of the conditions by which its status tells the end.
    """

    name: str
    kind: str
    resource: Resource
    container: str = "node"
    succeeded: str = "Complete"
    failed: str = "Failed"

    def main(self, run: PodRun) -> Manifest:
        """The object that makes the pods."""
        return {
            "apiVersion": self.resource.api_version,
            "kind": self.kind,
            "metadata": main_metadata(run),
            "spec": self.spec(run),
        }

    def spec(self, run: PodRun) -> Manifest:
        """Its specification."""
        raise NotImplementedError

    def before(self, run: PodRun) -> list[tuple[Resource, Manifest]]:
        """Objects that it refers to, and that must be there before it."""
        return []

    def beside(self, run: PodRun) -> list[tuple[Resource, Manifest]]:
        """Objects that belong to it, and are deleted with it."""
        objects = [(SECRETS, secret(run))]
        if run.tls:
            objects.append((SECRETS, tls_secret(run)))
        if run.script:
            objects.append((CONFIG_MAPS, config_map(run)))
        return objects

    def state(self, manifest: Mapping[str, Any]) -> State:
        """What the status of the object says."""
        for condition in manifest.get("status", {}).get("conditions") or ():
            if condition.get("status") == "True" and condition.get("type") in (self.succeeded, self.failed):
                failed = condition["type"] == self.failed
                return State(True, failed, condition.get("reason", ""), condition.get("message", ""))
        return State()

    def node_of(self, pod: Mapping[str, Any]) -> int:
        """Number of the node that a pod is."""
        about = pod["metadata"]
        index = "batch.kubernetes.io/job-completion-index"
        return int(about.get("annotations", {}).get(index) or about.get("labels", {}).get(index) or 0)
