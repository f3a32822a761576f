"""Turns the errors of remote stores into errors with a code: no credentials, no bucket, no answer.

Each file system of fsspec raises exceptions of its own. They are recognised by the code in the store's answer, if there is one,
and otherwise by the names of their classes. So no package of a store is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.base.errors import CheckpointError

_NO_CREDENTIALS = {
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AccessDenied", "403", "Forbidden",
    "InvalidClientTokenId", "AllAccessDisabled", "RequestTimeTooSkewed", "401",
}  # fmt: skip
_NO_BUCKET = {"NoSuchBucket", "InvalidBucketName"}
_UNREACHABLE = ("Connect", "Timeout", "HTTPClientError", "Endpoint", "ServerDisconnected", "ClientOSError", "gaierror")
_CREDENTIALS = ("Credential", "Auth", "TokenRetrieval", "SSOToken")


@contextmanager
def coded_errors(url: str) -> Iterator[None]:
    """Turns the errors of a `with` block into `checkpoint-credentials`, `-bucket`, `-unreachable`, `-store-failed`.

    FileNotFoundError and FileExistsError pass through, because the callers expect them.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # Every package behind fsspec has its own exceptions. One that is not recognised is raised unchanged.
        coded = _coded(url, error)
        if coded is None:
            raise
        raise coded from error


def no_bucket(url: str, why: str) -> CheckpointError:
    """Returns the error for a bucket that does not exist."""
    return CheckpointError(
        "checkpoint-bucket",
        f"there is no bucket for {url}.",
        why=why,
        fix="create the bucket, or correct its name; Paceline creates none",
    )


def _coded(url: str, error: Exception) -> CheckpointError | None:
    """Returns the error with a code for an exception; None if it is to be raised unchanged."""
    chain = list(causes_of(error))
    codes = {code_of(cause) for cause in chain} - {""}
    reason = str(chain[-1]).strip() or "it gave no reason"
    why = f"{type(chain[-1]).__name__}: {reason}".split("\n", maxsplit=1)[0]
    if codes & _NO_BUCKET:
        return no_bucket(url, why)
    if isinstance(error, FileNotFoundError | FileExistsError):
        return None
    if codes & _NO_CREDENTIALS or _named(chain, _CREDENTIALS) or isinstance(error, PermissionError):
        return CheckpointError(
            "checkpoint-credentials",
            f"the store of {url} does not let this process in.",
            why=why,
            fix="give it credentials that may read, write, list and delete there (for S3: AWS_PROFILE, or AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, on every host)",
        )
    if _named(chain, _UNREACHABLE) or any(isinstance(cause, ConnectionError | TimeoutError) for cause in chain):
        return CheckpointError(
            "checkpoint-unreachable",
            f"the store of {url} does not answer.",
            why=why,
            fix="check the network and the endpoint (for S3: AWS_ENDPOINT_URL, AWS_DEFAULT_REGION); "
            "what was saved before is untouched",
        )
    if codes or isinstance(error, OSError):
        return CheckpointError(
            "checkpoint-store-failed",
            f"the store of {url} refused a request.",
            why=why,
            fix="check the reason that the store gives; earlier checkpoints are untouched",
        )
    return None


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, and those from which it was raised."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def code_of(error: BaseException) -> str:
    """Returns the code of the store's answer, or "". botocore has it in `response`, HTTP clients in `status` or `code`."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", ""))
    return str(getattr(error, "status", "") or getattr(error, "code", "") or "")


def _named(chain: list[BaseException], words: tuple[str, ...]) -> bool:
    """Returns whether the class of an error, or one of its base classes, has one of these words in its name."""
    for cause in chain:
        for kind in type(cause).__mro__:
            if any(word in kind.__name__ for word in words):
                return True
    return False
