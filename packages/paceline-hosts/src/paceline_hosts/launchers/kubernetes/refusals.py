"""Reads the errors of an API server, and turns each into one that tells the user what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.base.errors import LaunchError, Problem


@dataclass
class Refusal(Exception):
    """An answer of 400 or more.

    Attributes:
        status: the HTTP status.
        message: the message of the server.
        causes: fields and what is wrong with each, if the server names them.
        doing: the method and the path of the request.
    """

    status: int
    message: str
    causes: tuple[str, ...] = ()
    doing: str = ""

    @classmethod
    def of(cls, status: int, data: bytes, method: str, path: str) -> Refusal:
        """Reads an answer. It is a `Status` object if it comes from the API server, and any text if a proxy has sent it."""
        try:
            body = json.loads(data)
            message = str(body["message"])
            details = body.get("details") or {}
            causes = details.get("causes") or ()
            listed = tuple(f"{cause.get('field', '?')}: {cause.get('message', '')}" for cause in causes)
        except (ValueError, KeyError, TypeError, AttributeError):
            message = data.decode(errors="replace")[:400]
            listed = ()
        return cls(status, message, listed, f"{method} {path}")

    def __str__(self) -> str:
        return f"{self.doing}: {self.status} {self.message}"

    def problem(self, namespace: str) -> Problem:
        """Returns the problem to show to the user."""
        if self.status == 401:
            why = f"the API server answers: {self.message}"
            fix = "log in again, as for kubectl: the token or the certificate of the kubeconfig file may have expired"
            return Problem("kubernetes-login", "the cluster does not know this user.", why, fix)
        if self.status == 403:
            return self._forbidden(namespace)
        if self.status == 404 and re.search(r"namespaces? .*not found", self.message):
            return namespace_missing(namespace, "")
        if self.status == 409:
            why = f"the API server answers: {self.message}"
            fix = "start the command again: each run has another name"
            return Problem("kubernetes-conflict", "an object of that name is there already.", why, fix)
        if self.status in (400, 422):
            reasons = [f"the API server answers: {self.message}", *self.causes]
            fix = "correct the field in the --values file, or use a kind that this version of the cluster has (--kind)"
            return Problem("kubernetes-manifest", "the cluster does not accept the manifest.", reasons, fix)
        why = f"{self.doing}: {self.status} {self.message}"
        fix = "look at the state of the cluster (`kubectl get --raw /readyz`), then start the command again"
        return Problem("kubernetes-api", "the cluster's API gives an error.", why, fix)

    def _forbidden(self, namespace: str) -> Problem:
        """Returns the problem of a 403: a missing permission, or a quota or an admission rule that refuses the run."""
        why = f"the API server answers: {self.message}"
        verb = re.search(r'cannot (\w+) resource "([^"]+)" in API group "([^"]*)"', self.message)
        if verb is None:
            what = "the cluster does not allow this run."
            return Problem("kubernetes-forbidden", what, why, "ask for less, or those who set the quota or the rule")
        return may_not([(verb[1], verb[2], verb[3])], namespace, why)


@contextmanager
def as_error(namespace: str) -> Iterator[None]:
    """Turns a refusal into the error for the user.

    Raises:
        LaunchError: that of `Refusal.problem`.
    """
    try:
        yield
    except Refusal as refusal:
        raise LaunchError.of([refusal.problem(namespace)]) from None


def may_not(verbs: list[tuple[str, str, str]], namespace: str, why: str) -> Problem:
    """Returns the problem of a user who lacks permissions.

    Args:
        verbs: each verb with its resource and API group.
        namespace: the namespace.
        why: the source of this information.
    """
    listed = []
    for verb, resource, group in verbs:
        full_name = f"{resource}.{group}" if group else resource
        listed.append(f"{verb} {full_name}")
    what = f"this user may not do in namespace {namespace} what the run needs: {'; '.join(listed)}."
    fix = f"ask for a Role with these verbs (`kubectl auth can-i {verbs[0][0]} {verbs[0][1]} -n {namespace}` tells)"
    return Problem("kubernetes-forbidden", what, why, fix)


def namespace_missing(namespace: str, known: str) -> Problem:
    """Returns the problem of a namespace that does not exist."""
    fix = "give --namespace one that is there, or make it: `kubectl create namespace " + namespace + "`"
    return Problem("kubernetes-namespace", f"there is no namespace {namespace!r} in the cluster.", known, fix)


def unreachable(host: str, source: str, error: Exception) -> LaunchError:
    """Returns the error if no server answers, or one whose certificate is not trusted."""
    reason = str(getattr(error, "reason", None) or error)
    in_one_line = " ".join(reason.split())
    return LaunchError(
        "kubernetes-unreachable",
        f"no cluster answers at {host}.",
        why=[source, in_one_line[:400]],
        fix="check that `kubectl get pods` works here: the address, the network, a proxy, the certificate",
    )
