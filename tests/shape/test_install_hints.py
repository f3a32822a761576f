"""What errors and docs tell to install exists: Paceline itself is not on PyPI, so neither is any of its extras."""

from __future__ import annotations

import re
from pathlib import Path

# Names on PyPI, spelt as pip takes them. `{package}`, `{library}` and `{name}` stand for one of these, filled in later.
ON_PYPI = {
    "accelerate",
    "bitsandbytes",
    "cloudpickle",
    "comet_ml",
    "deepspeed",
    "kubernetes",
    "ninja",
    "numpy",
    "nvidia-ml-py",
    "pre-commit",
    "s3fs",
    "shtab",
    "torchdata",
    "tensorboard",
    "torch",
    "torchao",
    "wandb",
    "aim",
    "clearml",
    "dvclive",
    "mlflow",
    "swanlab",
    "trackio",
    "peft",
    "ray",
    "transformers",
    "{package}",
    "{library}",
    "{name}",
}
INSTALL = re.compile(r"pip install ([^`'\"\n)]*(?:\"[^\"\n]*\")?)")
OPTIONS_WITH_A_VALUE = ("-c", "-r", "-e")


def installed(text: str) -> list[str]:
    """What the commands of a text install: names without versions; folders and files are left out."""
    names = []
    for command in INSTALL.findall(text):
        words = command.replace('"', "").split()
        for before, word in zip(["", *words], words, strict=False):
            if word.startswith(("-", "#")) or before in OPTIONS_WITH_A_VALUE:
                continue
            if word in ("&&", "||", ";", "for"):  # the command, or the sentence's part about it, is over
                break
            if "/" in word:  # a folder or a file
                continue
            if word.startswith("git+"):  # an address, as in the command that accelerate sends to a TPU host
                continue
            names.append(re.split(r"[=<>,;]", word)[0])
    return names


def hints(root: Path) -> dict[str, list[str]]:
    places = [root / "README.md", root / "CONTRIBUTING.md"]
    places += root.glob("packages/*/README.md")
    for folder in ("docs", "examples", "benchmarks", "packages/*/src", "packages/*/tests/compat"):
        places += [path for path in root.glob(f"{folder}/**/*") if path.suffix in (".py", ".md", ".txt")]
    found = {str(path.relative_to(root)): installed(path.read_text(encoding="utf-8")) for path in places}
    return {place: names for place, names in found.items() if names}


def test_every_package_that_is_named_can_be_installed(root) -> None:
    found = hints(root)
    wrong = {place: sorted(set(names) - ON_PYPI) for place, names in found.items() if set(names) - ON_PYPI}
    assert not wrong, f"not on PYPI in this form, or missing in this test's list: {wrong}"
    assert (
        "packages/paceline-hosts/src/paceline_hosts/stores/objects.py" in found
        and "docs/how-to/checkpoint-to-s3.md" in found
    )


def test_the_name_of_each_package_that_a_tracker_needs_is_known() -> None:
    from paceline.observe.trackers.tracker import TRACKERS
    from paceline_deepspeed import monitors

    named = {tracker.package for tracker in TRACKERS if getattr(tracker, "requires", ())}
    for cls in vars(monitors).values():
        named |= set(getattr(cls, "requires", ()))
    assert {"tensorboard", "wandb", "comet_ml"} <= named <= ON_PYPI
