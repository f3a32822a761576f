"""Where config files lie when nobody names one, and how one is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.base.errors import ConfigError


def own_default(env: Mapping[str, str]) -> Path:
    """Our default file: `paceline/config.yaml` under XDG_CONFIG_HOME (~/.config)."""
    home = env.get("XDG_CONFIG_HOME") or str(_home(env) / ".config")
    return Path(home) / "paceline" / "config.yaml"


def accelerate_default(env: Mapping[str, str]) -> Path:
    """accelerate's default file under HF_HOME, or `huggingface` under XDG_CACHE_HOME (~/.cache): YAML before JSON."""
    cache = env.get("XDG_CACHE_HOME") or str(_home(env) / ".cache")
    folder = Path(env.get("HF_HOME") or Path(cache) / "huggingface").expanduser() / "accelerate"
    yaml, as_json = folder / "default_config.yaml", folder / "default_config.json"
    return as_json if as_json.is_file() and not yaml.is_file() else yaml


def default_file(env: Mapping[str, str], *, compat: str | None = None) -> str | None:
    """The default file that exists: accelerate's where its names are served, else ours; None where there is none."""
    places = [accelerate_default(env)] if "accelerate" in (compat or "").split(",") else []
    return next((str(path) for path in [*places, own_default(env)] if path.is_file()), None)


def _home(env: Mapping[str, str]) -> Path:
    return Path(env["HOME"]) if env.get("HOME") else Path.home()


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
