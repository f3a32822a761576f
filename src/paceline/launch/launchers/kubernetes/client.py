"""The cluster's API, through the official client: it knows kubeconfig files, tokens, certificates and login programs.

Manifests and answers are plain dictionaries, as the API has them: kinds of other groups have no classes there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import LaunchError
from paceline.launch.launchers.kubernetes.kinds.kind import PODS, Resource
from paceline.launch.launchers.kubernetes.refusals import Refusal, unreachable

_CONNECT_S = 5.0
_ANSWER_S = 30.0
_WATCH_S = 240  # the server ends a watch after it, and we ask again
_GONE = 410  # a watch from a version that the server has forgotten
_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class Cluster:
    """One namespace of a cluster, as one user sees it.

    Args:
        api: the official client.
        namespace: where the run's objects are.
        source: where the address and the user come from, for errors.

    Attributes:
        namespace: where the run's objects are.
        source: where the address, the user and the namespace come from.
        closed: whether nobody is to ask any more.
    """

    def __init__(self, api: Any, namespace: str, source: str) -> None:
        self._api, self.namespace, self.source = api, namespace, source
        self._streams: set[Any] = set()
        self.closed = False

    def close(self) -> None:
        """Ends all watches and logs that other threads still read, and the connections."""
        self.closed = True
        for response in list(self._streams):
            with suppress(OSError, RuntimeError, ValueError):  # it has ended meanwhile
                response.shutdown()
        self._api.rest_client.pool_manager.clear()

    @classmethod
    def open(cls, context: str, namespace: str) -> Cluster:
        """The cluster that the kubeconfig file names, or the one that this process runs in. Nothing is asked yet.

        Args:
            context: of the kubeconfig file; "" for its current one.
            namespace: "" for that of the context.

        Raises:
            LaunchError: `kubernetes-client` where the official client is missing, `kubernetes-config`.
        """
        try:
            from kubernetes import config
            from kubernetes.client import ApiClient, Configuration
        except ImportError:
            raise LaunchError(
                "kubernetes-client",
                "the official client of Kubernetes is not installed.",
                why="the launcher kubernetes talks to the cluster through the Python package `kubernetes`",
                fix="pip install kubernetes",
            ) from None
        env = environment.snapshot()
        files = env.get("KUBECONFIG") or str(Path(env.get("HOME", ""), ".kube", "config"))
        configuration = Configuration()
        configuration.retries = False  # whoever follows a run begins again by itself
        configuration.keep_alive = True
        try:
            if not any(os.path.exists(path) for path in files.split(os.pathsep)) and "KUBERNETES_SERVICE_HOST" in env:
                config.load_incluster_config(client_configuration=configuration)
                own = Path(_NAMESPACE_FILE).read_text().strip()
                return cls(ApiClient(configuration), namespace or own, _source("the pod's service account", namespace))
            config.load_kube_config(files, context or None, configuration, persist_config=False)
            contexts, current = config.list_kube_config_contexts(files)
        except (config.ConfigException, OSError, TypeError) as error:
            named_by = "KUBECONFIG" if env.get("KUBECONFIG") else "the default"
            fix = "set KUBECONFIG to a file with which `kubectl get pods` works"
            if context:
                fix += ", or leave --kube-context out"
            raise LaunchError(
                "kubernetes-config",
                "the kubeconfig file does not say how to reach a cluster.",
                why=[f"{files} ({named_by})", str(error)],
                fix=fix,
            ) from None
        chosen = next((entry for entry in contexts if entry["name"] == context), current)
        own = chosen["context"].get("namespace") or "default"
        source = _source(f"context {chosen['name']} of {files}", namespace)
        return cls(ApiClient(configuration), namespace or own, source)

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] | None = None,
        body: object = None,
        answer_s: float | None = _ANSWER_S,
    ) -> Any:
        """Makes one request; returns the open response.

        Raises:
            Refusal: the server has said no.
            LaunchError: `kubernetes-unreachable`.
        """
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        pairs = [(name, str(value)) for name, value in (query or {}).items()]
        headers = {"Accept": "application/json, */*", "Content-Type": "application/json"}
        request = self._api.param_serialize(
            method, path, query_params=pairs, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            response = self._api.call_api(*request, _request_timeout=(_CONNECT_S, answer_s))
            if response.status < 400:
                return response.response
            data = response.response.data
        except (HTTPError, ApiException) as error:
            raise unreachable(self._api.configuration.host, self.source, error) from None
        raise Refusal.of(response.status, data, method, path)

    def get(self, path: str, query: Mapping[str, object] | None = None) -> Any:
        """What the API has at a path."""
        return json.loads(self._call("GET", path, query).data)

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer to a question that is sent as an object."""
        return json.loads(self._call("POST", path, body=body).data)

    def create(self, resource: Resource, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Makes an object; a field that the cluster does not know is an error, and not dropped without a word."""
        query = {"fieldValidation": "Strict", "fieldManager": "paceline"}
        created: dict[str, Any] = json.loads(self._call("POST", resource.path(self.namespace), query, manifest).data)
        return created

    def delete(self, resource: Resource, name: str, grace_s: int | None = None) -> None:
        """Deletes an object and what belongs to it; one that is not there is no error."""
        options: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        try:
            self._call("DELETE", resource.path(self.namespace, name), body=options).data  # noqa: B018
        except Refusal as refusal:
            if refusal.status != 404:
                raise

    def may(self, verb: str, resource: Resource, subresource: str = "") -> bool:
        """Whether this user may do something in the namespace."""
        attributes = {
            "namespace": self.namespace,
            "verb": verb,
            "group": resource.group,
            "resource": resource.plural,
            "subresource": subresource,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = self.ask("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    def has(self, resource: Resource) -> bool:
        """Whether the cluster knows a kind of object."""
        try:
            api_group = self.get(f"/apis/{resource.group}/{resource.version}")
        except Refusal as refusal:
            if refusal.status == 404:
                return False
            raise
        return any(entry["name"] == resource.plural for entry in api_group["resources"])

    def watch(
        self, resource: Resource, present: dict[str, dict[str, Any]], **selectors: str
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """What happens to some objects, without end: first each that is there, as ADDED, then each change.

        Args:
            resource: their kind.
            present: the objects that the caller knows of, by uid; kept up to date here. An object that is deleted while
                nobody watches has no event: it is one of these that a list does not have.
            **selectors: `labelSelector` or `fieldSelector`.
        """
        path = resource.path(self.namespace)
        while not self.closed:
            listed = self.get(path, selectors)
            items = {item["metadata"]["uid"]: item for item in listed["items"]}
            for uid in present.keys() - items.keys():
                yield "DELETED", present.pop(uid)
            present.update(items)
            for item in listed["items"]:
                yield "ADDED", item
            version = listed["metadata"]["resourceVersion"]
            while version and not self.closed:
                version = yield from self._watch_from(path, present, selectors, version)

    def _watch_from(
        self, path: str, present: dict[str, dict[str, Any]], selectors: Mapping[str, str], version: str
    ) -> Generator[tuple[str, dict[str, Any]], None, str]:
        """One watch; returns the version from which the next one goes on, "" where all is to be listed again."""
        query = {
            **selectors,
            "watch": "true",
            "resourceVersion": version,
            "timeoutSeconds": _WATCH_S,
            "allowWatchBookmarks": "true",
        }
        try:
            response = self._call("GET", path, query, answer_s=_WATCH_S + _ANSWER_S)
        except Refusal as refusal:
            if refusal.status == _GONE:
                return ""
            raise
        for line in self._lines(response):
            event = json.loads(line)
            if event["type"] == "ERROR":
                if event["object"].get("code") == _GONE:
                    return ""
                raise Refusal.of(event["object"].get("code", 500), json.dumps(event["object"]).encode(), "GET", path)
            version = event["object"]["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK":
                continue
            present[event["object"]["metadata"]["uid"]] = event["object"]
            if event["type"] == "DELETED":
                del present[event["object"]["metadata"]["uid"]]
            yield event["type"], event["object"]
        return version

    def log(self, pod: str, container: str, since: str) -> Iterator[tuple[str, bytes]]:
        """Lines of a container's log, each with its time stamp, until the container or the connection ends.

        Args:
            pod, container: whose.
            since: time stamp from which the log is read; "" for its beginning.
        """
        query = {"container": container, "follow": "true", "timestamps": "true"}
        if since:
            query["sinceTime"] = since
        response = self._call("GET", f"{PODS.path(self.namespace, pod)}/log", query, answer_s=None)
        for line in self._lines(response):
            stamp, _, text = line.partition(b" ")
            yield stamp.decode(errors="replace"), text

    def _lines(self, response: Any) -> Iterator[bytes]:
        """Whole lines of a response, as they come; a connection that breaks ends them."""
        from urllib3.exceptions import HTTPError

        part = b""
        self._streams.add(response)
        if self.closed:  # `close` came before it could see this one
            response.shutdown()
        try:
            for chunk in response.stream(1 << 16):
                *lines, part = (part + chunk).split(b"\n")
                yield from (line for line in lines if line)
        except (HTTPError, OSError, ValueError):  # ValueError: `close` has taken the file from under it
            return
        finally:
            self._streams.discard(response)
            response.close()
        if part:
            yield part


def _source(user: str, namespace: str) -> str:
    """Where a cluster's address and user come from, and the namespace, if that was said."""
    return f"{user}; --namespace {namespace}" if namespace else user
