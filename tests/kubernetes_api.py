"""An API server of Kubernetes on this machine: the protocol that clients see, over TLS, with tokens; no cluster behind it.

    with ApiServer(folder, groups=["jobset.x-k8s.io/v1alpha2"]) as api:
        os.environ["KUBECONFIG"] = api.kubeconfig
        ... what a client creates is in `api.objects`; `api.put(...)` and `api.log(...)` say what a cluster would

What it does as the real one: discovery of groups, create, get, list, watch (with resource versions, and 410), delete, logs
with `follow`, `timestamps` and `sinceTime`, SelfSubjectAccessReview, and the `Status` objects of 400, 401, 403, 404, 409
and 422. What becomes of objects is for controllers: `kubernetes_pods.py` has small ones.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import yaml
from aiohttp import web

Object = dict[str, Any]
CORE = ("pods", "secrets", "configmaps", "services", "nodes", "namespaces")
# Of each group and version: its kinds, by their plural.
KNOWN = {
    "batch/v1": {"jobs": "Job"},
    "jobset.x-k8s.io/v1alpha2": {"jobsets": "JobSet"},
    "trainer.kubeflow.org/v1alpha1": {"trainjobs": "TrainJob", "trainingruntimes": "TrainingRuntime"},
    "kubeflow.org/v1": {"pytorchjobs": "PyTorchJob"},
    "kueue.x-k8s.io/v1beta1": {"localqueues": "LocalQueue"},
}
_GOOD_BYE_S = 0.1
REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "AlreadyExists",
    410: "Expired",
    422: "Invalid",
}


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, message: str, causes: list[dict[str, str]] | None = None) -> None:
        super().__init__(message)
        self.body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}
        self.body["reason"] = REASONS[code]
        self.body["details"] = {"causes": causes} if causes else {}


def now() -> str:
    """The present time, as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ApiServer:
    """The server, from the beginning of a `with` to its end.

    Args:
        folder: for its certificate and the kubeconfig file.
        groups: of `KNOWN`, besides batch/v1.
        namespaces: those that there are.

    Attributes:
        kubeconfig: path of the file with which a client reaches it.
        objects: by plural, namespace and name; read and written under `lock`.
        denied: pairs of verb and resource ("get", "pods/log") that the user may not do.
        lacks: fields that this version of the cluster does not know, such as "spec.failurePolicy".
        invalid: by plural, the field and the message of a 422.
        requests: method and path of each request, in order.
        cut_logs_after: lines after which a log is cut, once for each container: the connection of the first one breaks, the
            answer for the second one ends in the middle of a line; 0 for never.
        on_change: called with the event, plural and object of each change, in the server's thread.
    """

    def __init__(self, folder: Path, groups: tuple[str, ...] = (), namespaces: tuple[str, ...] = ("teams",)) -> None:
        self.folder = folder
        self.groups = ["batch/v1", *groups]
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.lock = threading.RLock()
        self.denied: set[tuple[str, str]] = set()
        self.lacks: set[str] = set()
        self.invalid: dict[str, tuple[str, str]] = {}
        self.requests: list[tuple[str, str]] = []
        self.cut_logs_after = 0
        self.on_change: list[Callable[[str, str, Object], None]] = []
        self.token = uuid.uuid4().hex
        self.port = 0
        self._versions = itertools.count(100)
        self._oldest = 0  # resource versions before it are forgotten
        self._history: list[tuple[int, str, str, Object]] = []
        self._logs: dict[str, list[tuple[str, str]]] = {}
        self._cut: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._waiters: set[asyncio.Future[None]] = set()
        for name in (*namespaces, "default"):
            self.put("namespaces", {"metadata": {"name": name}})

    # -- for tests and controllers ------------------------------------------------------------------------------

    def put(self, plural: str, manifest: Object, event: str = "") -> Object:
        """Makes or changes an object, and tells those who watch."""
        with self.lock:
            about = manifest["metadata"]
            key = (plural, about.get("namespace", ""), about["name"])
            event = event or ("MODIFIED" if key in self.objects else "ADDED")
            version = next(self._versions)
            stored = copy.deepcopy(manifest)
            stored["metadata"] |= {"resourceVersion": str(version)}
            stored["metadata"].setdefault("uid", str(uuid.uuid4()))
            stored["metadata"].setdefault("creationTimestamp", now())
            if event == "DELETED":
                self.objects.pop(key, None)
            else:
                self.objects[key] = stored
            self._history.append((version, event, plural, stored))
        self._wake()
        for listener in self.on_change:
            listener(event, plural, copy.deepcopy(stored))
        return copy.deepcopy(stored)

    def remove(self, plural: str, namespace: str, name: str) -> None:
        """Takes an object away."""
        with self.lock:
            stored = self.objects.get((plural, namespace, name))
        if stored is not None:
            self.put(plural, stored, "DELETED")

    def find(self, plural: str, name: str = "") -> list[Object]:
        """Objects of a kind, in all namespaces."""
        with self.lock:
            return [copy.deepcopy(o) for (p, _, n), o in self.objects.items() if p == plural and name in ("", n)]

    def left(self) -> list[str]:
        """What a run would leave behind."""
        with self.lock:
            return sorted(
                f"{plural}/{name}"
                for plural, _, name in self.objects
                if plural not in ("namespaces", "nodes", "localqueues")
            )

    def log(self, uid: str, text: str) -> None:
        """Adds lines to the log of a pod's container, all with the same time stamp."""
        stamp = datetime.now(UTC).isoformat(timespec="microseconds")
        with self.lock:
            lines = self._logs.setdefault(uid, [])
            lines += [(stamp, line) for line in text.splitlines()]
        self._wake()

    def forget(self) -> None:
        """Forgets the history, as a server does after a while: watches from old versions get 410."""
        with self.lock:
            self._oldest = next(self._versions)
            self._history.clear()

    # -- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(20)
        self.kubeconfig = str(self.folder / "kubeconfig")
        server = f"https://127.0.0.1:{self.port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [
                {"name": "here", "context": {"cluster": "c", "user": "jane", "namespace": "teams"}},
                {"name": "stranger", "context": {"cluster": "c", "user": "nobody"}},
                {"name": "distrustful", "context": {"cluster": "d", "user": "jane"}},
            ],
            "clusters": [
                {"name": "c", "cluster": {"server": server, "certificate-authority": str(self.folder / "ca.pem")}},
                {"name": "d", "cluster": {"server": server}},
            ],
            "users": [
                {"name": "jane", "user": {"token": self.token}},
                {"name": "nobody", "user": {"token": "x" * 32}},
            ],
        }
        Path(self.kubeconfig).write_text(yaml.safe_dump(config))
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(RuntimeError):  # a test has ended it
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._run(ready))
        self._loop.close()

    async def _run(self, ready: threading.Event) -> None:
        import ssl

        self._stop = asyncio.Event()
        app = web.Application(middlewares=[self._guard])
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=_GOOD_BYE_S)
        await runner.setup()
        http = runner.server
        certificate(self.folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "ca.pem", self.folder / "key.pem")
        # A connection whose client does not take its leave is cut off soon: left open it would have the client wait.
        server = await self._loop.create_server(http, "127.0.0.1", 0, ssl=context, ssl_shutdown_timeout=_GOOD_BYE_S)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stop.wait()
        server.close()
        self._pulse()
        await runner.cleanup()
        # Connections whose handshake ended during the clean-up are closed too: their clients would wait for an answer.
        for _ in range(3):
            await asyncio.sleep(_GOOD_BYE_S)
            await http.shutdown(_GOOD_BYE_S)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._pulse)

    def _pulse(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def _wait(self, seconds: float) -> None:
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        await asyncio.wait([waiter], timeout=seconds)
        self._waiters.discard(waiter)

    # -- requests -----------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs))
        try:
            if request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized")
            return await handler(request)
        except ConnectionResetError:  # the client has left
            return web.Response()
        except Refused as refused:
            return web.json_response(refused.body, status=int(refused.body["code"]))  # type: ignore[call-overload]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if parts[0] == "api":
            group, parts = "", parts[2:]
        elif parts[0] == "apis" and len(parts) >= 3:
            group, parts = f"{parts[1]}/{parts[2]}", parts[3:]
        else:
            raise Refused(404, "the server could not find the requested resource")
        if group == "authorization.k8s.io/v1":
            return await self._review(request)
        if group and group not in self.groups:
            raise Refused(404, "the server could not find the requested resource")
        if group and not parts:
            resources = [{"name": plural, "kind": kind, "namespaced": True} for plural, kind in KNOWN[group].items()]
            return web.json_response({"kind": "APIResourceList", "groupVersion": group, "resources": resources})
        namespace = ""
        if parts[0] == "namespaces" and len(parts) > 2:
            namespace, parts = parts[1], parts[2:]
        plural, name, sub = (*parts, "", "")[:3]
        if plural not in (KNOWN[group] if group else CORE):
            raise Refused(404, "the server could not find the requested resource")
        self._permit(request, plural, name, sub, group, namespace)
        if request.method == "POST":
            return await self._create(request, group, plural, namespace)
        if request.method == "DELETE":
            return await self._delete(request, plural, namespace, name)
        if sub == "log":
            return await self._log(request, namespace, name)
        if name:
            return web.json_response(self._get(plural, namespace, name))
        if request.query.get("watch") == "true":
            return await self._watch(request, plural, namespace)
        with self.lock:
            items = [
                o
                for (p, s, _), o in self.objects.items()
                if p == plural and s == namespace and selected(o, request.query)
            ]
            version = str(next(self._versions))
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": version}, "items": items})

    def _permit(self, request: web.Request, plural: str, name: str, sub: str, group: str, namespace: str) -> None:
        verb = {"POST": "create", "DELETE": "delete"}.get(request.method, "get" if name else "list")
        if request.query.get("watch") == "true":
            verb = "watch"
        resource = f"{plural}/{sub}" if sub else plural
        if (verb, resource) in self.denied:
            where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            what = f'cannot {verb} resource "{resource}" in API group "{group.partition("/")[0]}"'
            raise Refused(403, f'{resource} is forbidden: User "jane" {what} {where}')

    async def _review(self, request: web.Request) -> web.Response:
        review = await request.json()
        asked = review["spec"]["resourceAttributes"]
        resource = f"{asked['resource']}/{asked['subresource']}" if asked["subresource"] else asked["resource"]
        review["status"] = {"allowed": (asked["verb"], resource) not in self.denied}
        return web.json_response(review, status=201)

    def _get(self, plural: str, namespace: str, name: str) -> Object:
        with self.lock:
            if (plural, namespace, name) not in self.objects:
                raise Refused(404, f'{plural} "{name}" not found')
            return copy.deepcopy(self.objects[plural, namespace, name])

    async def _create(self, request: web.Request, group: str, plural: str, namespace: str) -> web.Response:
        manifest = await request.json()
        name = manifest["metadata"]["name"]
        if ("namespaces", "", namespace) not in self.objects:
            raise Refused(404, f'namespaces "{namespace}" not found')
        assert manifest["apiVersion"] == (group or "v1")
        unknown = sorted(field for field in self.lacks if has(manifest, field))
        if unknown and request.query.get("fieldValidation") == "Strict":
            fields = ", ".join(f'unknown field "{field}"' for field in unknown)
            raise Refused(
                400,
                f"{manifest['kind']} in version {manifest['apiVersion']!r} cannot be handled: strict decoding error: {fields}",
            )
        if plural in self.invalid:
            field, message = self.invalid[plural]
            cause = {"reason": "FieldValueInvalid", "message": message, "field": field}
            raise Refused(422, f'{manifest["kind"]} "{name}" is invalid: {field}: {message}', [cause])
        if (plural, namespace, name) in self.objects:
            raise Refused(409, f'{plural} "{name}" already exists')
        manifest["metadata"] = {**manifest["metadata"], "namespace": namespace}
        return web.json_response(self.put(plural, manifest), status=201)

    async def _delete(self, request: web.Request, plural: str, namespace: str, name: str) -> web.Response:
        stored = self._get(plural, namespace, name)
        options = await request.json() if request.can_read_body else {}
        if plural == "pods":
            # The kubelet takes it away when its processes have ended.
            stored["metadata"]["deletionTimestamp"] = now()
            stored["metadata"]["deletionGracePeriodSeconds"] = options.get("gracePeriodSeconds", 30)
            self.put(plural, stored)
        else:
            self.put(plural, stored, "DELETED")
            self._collect(stored["metadata"]["uid"])
        return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _collect(self, owner: str) -> None:
        """Deletes what belonged to an object, as the garbage collector does; pods are left to the kubelet."""
        with self.lock:
            owned = [
                (key, o)
                for key, o in self.objects.items()
                if any(r["uid"] == owner for r in o["metadata"].get("ownerReferences", ()))
            ]
        for (plural, _, _), stored in owned:
            if plural == "pods":
                stored = copy.deepcopy(stored)
                stored["metadata"]["deletionTimestamp"] = now()
                self.put(plural, stored)
            else:
                self.put(plural, stored, "DELETED")

    async def _watch(self, request: web.Request, plural: str, namespace: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        version = int(request.query["resourceVersion"])
        until = time.monotonic() + int(request.query.get("timeoutSeconds", "300"))
        while time.monotonic() < until and not self._stop.is_set():
            if version < self._oldest:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                break
            with self.lock:
                events = [e for e in self._history if e[0] > version and e[2] == plural]
            for number, event, _, stored in events:
                version = number
                if stored["metadata"].get("namespace", "") == namespace and selected(stored, request.query):
                    await response.write(json.dumps({"type": event, "object": stored}).encode() + b"\n")
            await self._wait(0.5)
        return response

    async def _log(self, request: web.Request, namespace: str, name: str) -> web.StreamResponse:
        pod = self._get("pods", namespace, name)
        uid = pod["metadata"]["uid"]
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        since = request.query.get("sinceTime", "")
        with self.lock:
            sent = sum(stamp < since for stamp, _ in self._logs.get(uid, []))
        while not self._stop.is_set():
            with self.lock:
                lines = self._logs.get(uid, [])[sent:]
                present = self.objects.get(("pods", namespace, name), {})
            for stamp, line in lines:
                if self.cut_logs_after and sent >= self.cut_logs_after and uid not in self._cut:
                    self._cut.add(uid)
                    assert request.transport is not None
                    if len(self._cut) == 1:
                        request.transport.abort()
                    else:
                        await response.write(f"{stamp} {line}"[:-1].encode())
                    return response
                await response.write(f"{stamp} {line}\n".encode())
                sent += 1
            statuses = present.get("status", {}).get("containerStatuses") or [{"state": {"terminated": {}}}]
            if not lines and "running" not in statuses[0]["state"]:
                break
            await self._wait(0.2)
        return response


def selected(stored: Object, query: Any) -> bool:
    """Whether an object is one of those that selectors ask for."""
    labels = stored["metadata"].get("labels") or {}
    for pair in filter(None, query.get("labelSelector", "").split(",")):
        name, _, value = pair.partition("=")
        if labels.get(name) != value:
            return False
    field = query.get("fieldSelector", "")
    return not field or stored["metadata"]["name"] == field.removeprefix("metadata.name=")


def has(manifest: Any, path: str) -> bool:
    """Whether a manifest has a field, by its path with dots."""
    for part in path.split("."):
        if not isinstance(manifest, dict) or part not in manifest:
            return False
        manifest = manifest[part]
    return True


def certificate(folder: Path) -> None:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "paceline's tests")])
    begin = datetime.now(UTC) - timedelta(hours=1)
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), begin, begin + timedelta(days=2)
    )
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = builder.add_extension(address, False).add_extension(x509.BasicConstraints(True, None), True)
    usage = x509.KeyUsage(True, False, False, False, False, True, False, False, False)
    builder = builder.add_extension(usage, True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    signed = builder.sign(key, hashes.SHA256())
    (folder / "ca.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    no_password = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_password)
    (folder / "key.pem").write_bytes(pem)


def until(true: Callable[[], object], what: str, timeout_s: float = 30) -> Any:
    """Waits until `true()`; returns what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (answer := true()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)
    return answer


def serving(folder: Path, *groups: str) -> Iterator[ApiServer]:
    """For fixtures."""
    with ApiServer(folder, groups) as api:
        yield api
