"""Files of others are those of the release that `dev/vendored.toml` names, with a licence, and none is unlisted."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def vendored(root: Path) -> dict[str, dict]:
    return tomllib.loads((root / "dev" / "vendored.toml").read_text(encoding="utf-8"))


def test_their_hashes_are_those_that_were_written_down(root: Path, vendored: dict[str, dict]) -> None:
    for name, entry in vendored.items():
        assert {"version", "license", "license_file", "source", "obtained", "used_for"} <= set(entry), name
        assert entry["license_file"] in entry["sha256"]
        for path, digest in entry["sha256"].items():
            assert hashlib.sha256((root / path).read_bytes()).hexdigest() == digest, path


def test_a_script_names_the_same_version(root: Path, vendored: dict[str, dict]) -> None:
    for entry in vendored.values():
        for path in entry["sha256"]:
            if path.endswith(".js"):
                assert f"v{entry['version']}" in (root / path).read_text(encoding="utf-8")[:200]


def test_none_is_unlisted(root: Path, vendored: dict[str, dict]) -> None:
    listed = {path for entry in vendored.values() for path in entry["sha256"]}
    published = [
        *root.glob("packages/**/*.min.*"), *root.glob("docs/**/*.min.*"), *root.glob("packages/**/*.LICENSE"),
    ]  # fmt: skip
    assert {str(path.relative_to(root)) for path in published} == listed
