"""Calls the API of a cluster through the official client, which handles kubeconfig files, tokens, certificates and logins.

Manifests and answers are plain dictionaries, as in the API, because the client has no classes for kinds such as JobSet.
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
from paceline_hosts.launchers.kubernetes.kinds.kind import PODS, Resource
from paceline_hosts.launchers.kubernetes.refusals import Refusal, unreachable

_CONNECT_S = 5.0
_ANSWER_S = 30.0
_WATCH_S = 240  # the server ends a watch after this time, and we begin another
_GONE = 410  # the status if a watch begins at a version that the server has forgotten
_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class Cluster:
    """One namespace of a cluster, accessed as one user.

    Args:
        api: the official client.
        namespace: the namespace of the run's objects.
        source: where the address and the user come from, for errors.

    Attributes:
        namespace: the namespace of the run's objects.
        source: where the address, the user and the namespace come from.
        closed: whether `close` was called; threads that follow the cluster end then.
    """

    def __init__(self, api: Any, namespace: str, source: str) -> None:
        self._api = api
        self.namespace = namespace
        self.source = source
        self._streams: set[Any] = set()
        self.closed = False

    def close(self) -> None:
        """Ends all watches and logs that other threads still read, and the connections."""
        self.closed = True
        for response in list(self._streams):
            with suppress(OSError, RuntimeError, ValueError):  # the response has ended meanwhile
                response.shutdown()
        self._api.rest_client.pool_manager.clear()

    @classmethod
    def open(cls, context: str, namespace: str) -> Cluster:
        """Returns the cluster of the kubeconfig file, or the one in which this process runs. It makes no request yet.

        Args:
            context: the context of the kubeconfig file; "" for the current one.
            namespace: the namespace; "" for that of the context.

        Raises:
            LaunchError: `kubernetes-client` if the official client is missing, `kubernetes-config`.
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
        configuration.retries = False  # `Follower` tries again by itself, and says so if that lasts too long
        configuration.keep_alive = True
        try:
            has_file = any(os.path.exists(path) for path in files.split(os.pathsep))
            if not has_file and "KUBERNETES_SERVICE_HOST" in env:
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
            Refusal: if the server answers with an error.
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
        """Returns what the API has at a path."""
        return json.loads(self._call("GET", path, query).data)

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Sends an object that asks the API a question, and returns the answer."""
        return json.loads(self._call("POST", path, body=body).data)

    def create(self, resource: Resource, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Creates an object. A field that the cluster does not know is an error; by default the cluster would drop it."""
        query = {"fieldValidation": "Strict", "fieldManager": "paceline"}
        created: dict[str, Any] = json.loads(self._call("POST", resource.path(self.namespace), query, manifest).data)
        return created

    def delete(self, resource: Resource, name: str, grace_s: int | None = None) -> None:
        """Deletes an object and all objects that it owns. It is no error if the object does not exist."""
        options: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        try:
            self._call("DELETE", resource.path(self.namespace, name), body=options).data  # noqa: B018
        except Refusal as refusal:
            if refusal.status != 404:
                raise

    def may(self, verb: str, resource: Resource, subresource: str = "") -> bool:
        """Returns whether this user may do something in the namespace."""
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
        """Returns whether the cluster knows a kind of object."""
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
        """Yields what happens to some objects, without end: first each existing object as ADDED, then each change.

        Args:
            resource: the kind of the objects.
            present: the objects that the caller knows, by uid; kept up to date here. If an object is deleted between two
                watches, there is no event for it; it is found because it is in `present` and not in the next list.
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
        """Yields the events of one watch.

        Returns the version at which the next watch begins; "" if the objects must be listed again.
        """
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
            # A bookmark has no object: it only says that the watch may go on from this version.
            if event["type"] == "BOOKMARK":
                continue
            present[event["object"]["metadata"]["uid"]] = event["object"]
            if event["type"] == "DELETED":
                del present[event["object"]["metadata"]["uid"]]
            yield event["type"], event["object"]
        return version

    def log(self, pod: str, container: str, since: str, *, has_ended: bool) -> Iterator[tuple[str, bytes]]:
        """Yields the lines of a container's log, each with its time stamp, until the container or the connection ends.

        Args:
            pod, container: the names of the pod and of its container.
            since: the time stamp from which the log is read; "" for its beginning.
            has_ended: whether the container has ended. Only then does the log end with its last line; the answer of a
                cluster may also end in the middle of a line, which is left out.
        """
        query = {"container": container, "follow": "true", "timestamps": "true"}
        if since:
            query["sinceTime"] = since
        response = self._call("GET", f"{PODS.path(self.namespace, pod)}/log", query, answer_s=None)
        for line in self._lines(response, with_rest=has_ended):
            stamp, _, text = line.partition(b" ")
            yield stamp.decode(errors="replace"), text

    def _lines(self, response: Any, *, with_rest: bool = False) -> Iterator[bytes]:
        """Yields whole lines of a response as they arrive. A broken connection ends them without an error.

        Args:
            response: the response.
            with_rest: whether what stands after the last line break is a line too.
        """
        from urllib3.exceptions import HTTPError

        part = b""
        self._streams.add(response)
        if self.closed:
            # `close` has run in another thread before this response was in the set.
            response.shutdown()
        try:
            for chunk in response.stream(1 << 16):
                *lines, part = (part + chunk).split(b"\n")
                yield from (line for line in lines if line)
        except (HTTPError, OSError, ValueError):
            # A ValueError means that `close` has closed the file while this thread was reading.
            return
        finally:
            self._streams.discard(response)
            response.close()
        if part and with_rest:
            yield part


def _source(user: str, namespace: str) -> str:
    """Returns where a cluster's address and user come from, and the namespace if the user gave one."""
    return f"{user}; --namespace {namespace}" if namespace else user
