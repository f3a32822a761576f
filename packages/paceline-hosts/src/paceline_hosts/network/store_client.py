"""The process that speaks to a store for one launcher: `python -m paceline_hosts.network.store_client`.

    launcher --(stdin: first the endpoint, then one request a line)--> this process --(HTTP, or torch's TCPStore)--> store
    launcher <--(stdout: one answer a line)--

Resolving a name, a TLS handshake and the client of torch block, and the launcher can have no threads because it forks its
workers. So this is a process. The JSON gateway of etcd needs only the standard library. The process ends with the launcher,
which closes its standard input.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from paceline.base.lazy import fast_imports

_TIMEOUT_S = 1.0  # for one host of the store
_TOTAL_S = 3.0  # for all hosts; less than `witness.ANSWER_S`, for which the launcher waits
_LONGEST = 1 << 20
# Errors from reading an answer that is not one of etcd.
_NOT_ETCD = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_TOO_OLD = 404  # etcd's gateway before 3.4


class StoreRefusedError(Exception):
    """The store does not admit this client; asking again cannot help."""


class KeyStore(Protocol):
    """One key of a store."""

    def read(self) -> str | None:
        """Returns the value; None if there is none."""
        ...

    def swap(self, old: str | None, new: str | None) -> str | None:
        """Writes `new` if the value is `old`. Returns the value afterwards."""
        ...


class Etcd:
    """etcd 3.4 or later, over its JSON gateway.

    Args:
        hosts: host and port of each of its servers.
        key: the key of the value.
        user, password: "" if it does not ask for them.
        tls: the paths `ca`, `cert` and `key`, each "" for none; None without TLS.
    """

    def __init__(
        self, hosts: list[tuple[str, int]], key: str, user: str, password: str, tls: Mapping[str, str] | None
    ) -> None:
        self._hosts = list(hosts)
        self._key = _base64(key)
        self._user = user
        self._password = password
        self._token = ""
        self._context: ssl.SSLContext | None = None
        if tls is not None:
            self._context = ssl.create_default_context(cafile=tls.get("ca") or None)
            if tls.get("cert"):
                self._context.load_cert_chain(tls["cert"], tls.get("key") or None)

    def read(self) -> str | None:
        """Returns the value; None if there is none."""
        return _value(self._ask("kv/range", {"key": self._key}))

    def swap(self, old: str | None, new: str | None) -> str | None:
        """Writes in one transaction of etcd, which compares, and then puts, deletes or reads the value."""
        condition: dict[str, Any] = {"key": self._key, "result": "EQUAL"}
        if old is None:
            condition |= {"target": "CREATE", "create_revision": "0"}
        else:
            condition |= {"target": "VALUE", "value": _base64(old)}
        write: dict[str, Any] = {"request_delete_range": {"key": self._key}}
        if new is not None:
            write = {"request_put": {"key": self._key, "value": _base64(new)}}
        otherwise = {"request_range": {"key": self._key}}
        answer = self._ask("kv/txn", {"compare": [condition], "success": [write], "failure": [otherwise]})
        if answer.get("succeeded"):
            return new
        return _value(answer["responses"][0]["response_range"])

    def _ask(self, path: str, question: object) -> dict[str, Any]:
        """Asks the hosts in turn, beginning with the one that answered last."""
        deadline = time.monotonic() + _TOTAL_S
        problems = []
        for _ in range(len(self._hosts)):
            host, port = self._hosts[0]
            try:
                return self._post(host, port, path, question)
            except (OSError, http.client.HTTPException, *_NOT_ETCD) as error:
                problems.append(f"{host}:{port}: {_reason(error)}")
                self._hosts.append(self._hosts.pop(0))
            if time.monotonic() > deadline:
                break
        raise OSError("; ".join(problems))

    def _post(self, host: str, port: int, path: str, question: object) -> dict[str, Any]:
        if self._user and not self._token:
            self._log_in(host, port)
        try:
            return self._send(host, port, path, question)
        except StoreRefusedError:
            if not self._token:
                raise
            # A token expires after some minutes, so the request is repeated once with a new one.
            self._log_in(host, port)
            return self._send(host, port, path, question)

    def _log_in(self, host: str, port: int) -> None:
        secret = {"name": self._user, "password": self._password}
        self._token = self._send(host, port, "auth/authenticate", secret)["token"]

    def _send(self, host: str, port: int, path: str, question: object) -> dict[str, Any]:
        link: http.client.HTTPConnection
        if self._context is not None:
            link = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=self._context)
        else:
            link = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        try:
            headers = {"Content-Type": "application/json", "Connection": "close"}
            if self._token and not path.startswith("auth"):
                headers["Authorization"] = self._token
            link.request("POST", f"/v3/{path}", json.dumps(question), headers)
            answer = link.getresponse()
            text = answer.read(_LONGEST)
        finally:
            link.close()
        if answer.status == _TOO_OLD:
            raise StoreRefusedError("it has no JSON gateway at /v3, which etcd has from version 3.4 on")
        message = json.loads(text)
        if not isinstance(message, dict):
            raise OSError(f"status {answer.status}")
        if answer.status == http.client.OK:
            return message
        why = str(message.get("message") or message.get("error"))
        if any(word in why for word in ("auth", "permission", "token", "user name is empty")):
            raise StoreRefusedError(why)
        raise OSError(why)


class C10d:
    """torch's TCPStore at a host: `paceline store`, or what users of torchrun run for themselves.

    Args:
        host, port: where it listens.
        key: the key of the value.
    """

    def __init__(self, host: str, port: int, key: str) -> None:
        self._place = (host, port)
        self._key = key
        self._store: Any = None

    def read(self) -> str | None:
        """Returns the value. An empty value counts as none, since `compare_set` with empty values creates one."""
        return self.swap(None, None)

    def swap(self, old: str | None, new: str | None) -> str | None:
        """Writes by `compare_set` of torch's store."""
        with fast_imports():
            import torch.distributed
        dist: Any = torch.distributed  # its stubs lack the stores
        try:
            if self._store is None:
                self._store = dist.TCPStore(
                    *self._place, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_TOTAL_S / 2)
                )
            return self._store.compare_set(self._key, old or "", new or "").decode(errors="replace") or None
        except RuntimeError as error:
            self._store = None
            raise OSError(f"{self._place[0]}:{self._place[1]}: {str(error).splitlines()[0][:200]}") from None


def _base64(text: str) -> str:
    return base64.b64encode(text.encode(errors="replace")).decode()


def _value(answer: Mapping[str, Any]) -> str | None:
    rows = answer.get("kvs")
    if not rows:
        return None
    return base64.b64decode(rows[0].get("value", "")).decode(errors="replace")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}".lower().replace("_", " ")
    if isinstance(error, TimeoutError):
        return f"no answer within {_TIMEOUT_S:g} s"
    if isinstance(error, _NOT_ETCD):
        return "it does not speak etcd's JSON"
    if isinstance(error, http.client.HTTPException):
        return f"it does not speak HTTP ({type(error).__name__})"
    return str(getattr(error, "strerror", None) or error).lower()


def store_of(endpoint: Mapping[str, Any]) -> KeyStore:
    """Returns the store of an `Endpoint`, which the launcher has sent as JSON."""
    hosts = [(str(host), int(port)) for host, port in endpoint["hosts"]]
    if endpoint["kind"] == "c10d":
        return C10d(*hosts[0], endpoint["key"])
    return Etcd(hosts, endpoint["key"], endpoint["user"], endpoint["password"], endpoint["tls"])


def answer_to(store: KeyStore, request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer to a request: the value, or why there is none and whether the store has refused this client."""
    answer: dict[str, Any] = {"key": request["key"], "value": None, "trouble": "", "refused": False}
    try:
        swaps = request["swaps"]
        answer["value"] = store.swap(request["old"], request["new"]) if swaps else store.read()
    except StoreRefusedError as error:
        answer |= {"trouble": str(error), "refused": True}
    except _NOT_ETCD:
        answer["trouble"] = "it does not answer as etcd does"
    except (OSError, http.client.HTTPException) as error:
        answer["trouble"] = str(error) or type(error).__name__
    return answer


def main() -> int:
    """Answers requests until there are no more."""
    try:
        store: KeyStore | None = store_of(json.loads(sys.stdin.readline()))
        problem = ""
    except (OSError, ssl.SSLError) as error:  # a certificate that cannot be read
        store = None
        problem = _reason(error)
    for line in sys.stdin:
        request = json.loads(line)
        if store is None:
            answer = {"key": request["key"], "value": None, "trouble": problem, "refused": True}
        else:
            answer = answer_to(store, request)
        try:
            print(json.dumps(answer), flush=True)
        except BrokenPipeError:
            break
    # A thread of the client of torch may still wait. Nothing is left to do, so it is not waited for.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
