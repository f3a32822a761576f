"""Which extra of Paceline adds what, for errors about a part that is not installed.

It is the only place of the core that knows of other parts. `tests/shape/test_parts.py` compares it with their entry points.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path

from paceline.base.errors import ConfigError

# Extra -> group of entry points -> names.
ADDED: dict[str, dict[str, tuple[str, ...]]] = {
    "hosts": {
        "paceline.commands": ("doctor", "store"),
        "paceline.jobs_elsewhere": ("hosts",),
        "paceline.launchers": ("kubernetes", "openmpi", "pdsh", "ray", "slurm", "ssh"),
        "paceline.nodes": ("membership",),
        "paceline.stores": ("remote",),
    },
    "large": {
        "paceline.gradient_hooks": ("batched_power_sgd", "bf16", "fp16", "power_sgd"),
        "paceline.model_facts": ("experts",),
        "paceline.precisions": ("fp8",),
        "paceline.strategies": ("balance", "context", "experts", "fp8", "offload", "pipeline", "quantised", "tensor"),
    },
    "lens": {
        "paceline.commands": (
            "checkpoint diff", "checkpoint export", "checkpoint ls", "checkpoint prune", "checkpoint show",
            "checkpoint verify", "completion", "metrics", "plan", "ps", "rehearse", "test", "trackers", "tune", "verify",
            "watch",
        ),
        "paceline.hang_reports": ("hangs",),
        "paceline.observers": ("anomalies", "journal", "profile", "system_values"),
        "paceline.recordings": ("journal",),
        "paceline.trackers": (
            "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb",
        ),
    },
    "doors": {"paceline.commands": ("doors",), "paceline.name_servers": ("doors",)},
    "accelerate": {"paceline.libraries": ("accelerate",)},
    "deepspeed": {"paceline.commands": ("deepspeed",), "paceline.libraries": ("deepspeed",)},
}  # fmt: skip

# The packages that Python imports. Those of parts need not be installed.
PACKAGES = ("paceline", *(f"paceline_{extra}" for extra in ADDED))


def missing(extra: str, what: str, why: str) -> ConfigError:
    """Returns the error about a part that is not installed.

    Args:
        extra: the extra that adds the part.
        what: what cannot be used, with a verb: "the command `paceline verify` is".
        why: where it was asked for.
    """
    return ConfigError(
        "part-missing",
        f"{what} in a part of Paceline that is not installed: the extra {extra}.",
        why=why,
        fix=how_to_install(extra),
    )


def require(extra: str, what: str, why: str) -> None:
    """Checks that a part is installed, for one that uses another. The arguments are those of `missing`.

    Raises:
        ConfigError: `part-missing`.
    """
    if PathFinder.find_spec(f"paceline_{extra}") is None:
        raise missing(extra, what, why)


def how_to_install(extra: str) -> str:
    """Returns the command that installs a part: beside this one where it is a checkout, or as an extra."""
    beside = Path(__file__).resolve().parents[5] / "packages" / f"paceline-{extra}"
    if beside.is_dir():
        return f"pip install -e {beside}"
    return f"pip install 'paceline[{extra}]'"


def extra_with(group: str, name: str) -> str:
    """Returns the extra that adds an implementation; "" where none does."""
    for extra, groups in ADDED.items():
        if name in groups.get(group, ()):
            return extra
    return ""


def names_of_parts(group: str) -> list[str]:
    """Returns which names of a group the parts add, whether they are installed or not."""
    names: list[str] = []
    for groups in ADDED.values():
        names += groups.get(group, ())
    return names


def absent_names(group: str) -> list[str]:
    """Returns, for each extra that is not installed, which names of a group it adds and how it is installed."""
    absent = []
    for extra, groups in ADDED.items():
        if group in groups and PathFinder.find_spec(f"paceline_{extra}") is None:
            absent.append(f"`{how_to_install(extra)}` adds {', '.join(groups[group])}")
    return absent
