"""Where config files lie when nobody names one, and how one is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.base.errors import ConfigError
from paceline.config.dialects import dialects


def own_default(env: Mapping[str, str]) -> Path:
    """Our default file: `paceline/config.yaml` under XDG_CONFIG_HOME (~/.config)."""
    return user_folder(env, "XDG_CONFIG_HOME", ".config") / "paceline" / "config.yaml"


def default_file(env: Mapping[str, str], *, compat: str | None = None) -> str | None:
    """The default file that exists: a library's where its names are served, else ours; None where there is none."""
    served = (compat or "").split(",")
    paths = [dialect.default_file(env) for dialect in dialects() if dialect.name in served]
    for path in (*paths, own_default(env)):
        if path is not None and path.is_file():
            return str(path)
    return None


def user_folder(env: Mapping[str, str], variable: str, name: str) -> Path:
    """The user's folder for files of a kind: where `variable` says, else `name` in the home."""
    if env.get(variable):
        return Path(env[variable])
    home = Path(env["HOME"]) if env.get("HOME") else Path.home()
    return home / name


def write(path: Path, text: str) -> None:
    """Writes a config file and the folders above it.

    Raises:
        ConfigError: `config-write`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "name a file that you may write, with --output"
        raise ConfigError("config-write", f"{path} cannot be written.", error.strerror or str(error), fix) from None
