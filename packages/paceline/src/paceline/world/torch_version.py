"""Which releases of torch Paceline runs on: those it was tested with, newer ones with a warning, and no older one."""

from __future__ import annotations

import re
import sys

from paceline.base.errors import WorldError
from paceline.base.log import warn_once
from paceline.base.version import TORCH_NEWEST, TORCH_OLDEST, VERSION


def range_text() -> str:
    """Returns the tested releases, as one reads them."""
    return f"{_text(TORCH_OLDEST)} to {_text(TORCH_NEWEST)}"


def compare(version: str) -> str:
    """Where a release stands: "older" or "newer" than those that were tested, "tested", or "unknown".

    A build (`+cpu`, `+cu130`), a nightly or a release candidate counts as the release that it is of.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return "unknown"
    release = int(match[1]), int(match[2])
    if release < TORCH_OLDEST:
        return "older"
    return "newer" if release > TORCH_NEWEST else "tested"


def check(version: str, *, warn: bool = True) -> None:
    """Refuses a torch that is too old, and warns once, on rank 0, of one that is newer than those that were tested.

    Args:
        version: `torch.__version__`.
        warn: whether to warn; a launcher leaves that to the processes that it starts.

    Raises:
        WorldError: `torch-version`, for an older one.
    """
    standing = compare(version)
    if standing == "older":
        raise WorldError(
            "torch-version",
            f"Paceline {VERSION} does not run on torch {version}.",
            why=[
                f"it needs torch {_text(TORCH_OLDEST)} or newer, and was tested with {range_text()}",
                f"the Python {sys.executable} has torch {version}",
            ],
            fix=_install(),
        )
    if warn and standing in ("newer", "unknown"):
        warn_once(
            "torch",
            f"torch {version} is not a release that Paceline {VERSION} was tested with ({range_text()}); the run goes on. "
            f"If something fails, use a newer Paceline, or install a tested torch: {_install()}",
        )


def _install() -> str:
    """Returns the command that installs the newest tested release."""
    above = f"{TORCH_NEWEST[0]}.{TORCH_NEWEST[1] + 1}"
    return f'{sys.executable} -m pip install "torch>={_text(TORCH_OLDEST)},<{above}"'


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
