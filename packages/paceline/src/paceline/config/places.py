"""Finds the default config files, and writes a config file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from paceline.base.errors import ConfigError
from paceline.base.files import expanded
from paceline.config.dialects import dialects


def own_default(env: Mapping[str, str]) -> Path:
    """Returns the path of Paceline's default file: `paceline/config.yaml` under XDG_CONFIG_HOME (~/.config)."""
    return user_folder(env, "XDG_CONFIG_HOME", ".config") / "paceline" / "config.yaml"


def default_file(env: Mapping[str, str], *, compat: str | None = None) -> str | None:
    """Returns the default config file that exists; None if there is none.

    The file of another library comes first, if `compat` names the library; Paceline's own comes after it.
    """
    served = (compat or "").split(",")
    paths = [dialect.default_file(env) for dialect in dialects() if dialect.name in served]
    for path in (*paths, own_default(env)):
        if path is not None and path.is_file():
            return str(path)
    return None


def user_folder(env: Mapping[str, str], variable: str, name: str) -> Path:
    """Returns the user's folder for files of a kind: the one that `variable` names, otherwise `name` in the home folder."""
    if env.get(variable):
        return Path(env[variable])
    home = expanded(env.get("HOME") or "~")
    # A user of a container may be in no list of users, and so have no home. Container engines set HOME=/ then.
    if home == Path("~"):
        home = Path("/")
    return home / name


def write(path: Path, text: str) -> None:
    """Writes a config file and the folders above it. A file that exists stays whole if the process is interrupted.

    Raises:
        ConfigError: `config-write`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.resolve()  # a link stays a link
        if target.exists() and not target.is_file():  # such as /dev/stdout
            target.write_text(text, encoding="utf-8")
            return
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            unfinished.write_text(text, encoding="utf-8")
            if target.exists():
                shutil.copymode(target, unfinished)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        fix = "name a file that you may write, with --output"
        raise ConfigError("config-write", f"{path} cannot be written.", error.strerror or str(error), fix) from None
