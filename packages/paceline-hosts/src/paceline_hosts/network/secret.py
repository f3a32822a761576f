"""The secret by which the launchers of one run recognise each other.

If one command starts all launchers, it makes a secret for that run and sends it with the assignment (`remote/assignment.py`).
If the user starts each launcher, all read the same secret: from PACELINE_RUN_SECRET, from the file that
PACELINE_RUN_SECRET_FILE names, or from ~/.paceline/secret, which the first launcher on a host makes.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from paceline.base import env as environment
from paceline.base.errors import LaunchError

_SHORTEST = 16
_LONGEST = 4096
_FIX = "set PACELINE_RUN_SECRET to one value on every node (`openssl rand -hex 32` makes one)"


def new() -> str:
    """A new random secret."""
    return secrets.token_hex(32)


def of_user() -> str:
    """Returns the secret of the user, for launchers that are started on each node.

    Raises:
        LaunchError: `launch-secret`, where it is too short, cannot be read or made, or may be read by others.
    """
    given_secret = environment.get("PACELINE_RUN_SECRET")
    if given_secret:
        return _checked(given_secret, "PACELINE_RUN_SECRET")
    given_path = environment.get("PACELINE_RUN_SECRET_FILE")
    try:
        path = Path(given_path) if given_path else Path.home() / ".paceline" / "secret"
        if not given_path and not path.exists():
            _make(path)
        return _checked(_read(path), str(path))
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        reason = getattr(error, "strerror", None) or error
        why = f"{given_path or '~/.paceline/secret'}: {reason}"
        raise LaunchError("launch-secret", "the secret of this run cannot be read or made.", why, _FIX) from None


def _make(path: Path) -> None:
    """Writes a new secret, unless another launcher does so first, perhaps on another host with the same home directory."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".secret-{secrets.token_hex(8)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(new() + "\n")
    try:
        with suppress(FileExistsError):
            os.link(draft, path)  # atomic, and fails if the file exists
    finally:
        draft.unlink()


def _read(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        status = os.fstat(file.fileno())
        others = stat.S_IMODE(status.st_mode) & 0o077
        if others or status.st_uid not in (os.getuid(), 0):
            who = f"mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}"
            raise LaunchError(
                "launch-secret",
                f"the secret in {path} may be known to other users.",
                why=f"{who}; it must be of user {os.getuid()} (or root), and readable by nobody else",
                fix=f"rm {path} on every host and start again, which makes a new one; or chmod 600 {path}",
            )
        return file.read(_LONGEST).strip()


def _checked(secret: str, where: str) -> str:
    if len(secret) < _SHORTEST:
        why = f"{where} has a length of {len(secret)}; expected: {_SHORTEST} characters or more"
        raise LaunchError("launch-secret", "the secret of this run is too short.", why, _FIX)
    return secret
