"""Makes a release on this machine: everything that is published, and nothing is uploaded.

make release VERSION=0.2.0

dist/VERSION/
    paceline*-VERSION-py3-none-any.whl, paceline*-VERSION.tar.gz      of each part
    paceline-VERSION-docs.tar.gz      the pages of this version; they are read from the disk, search included
    sbom.cdx.json                     what all parts install, as CycloneDX
    NOTES.md                          the section of CHANGELOG.md
    SHA256SUMS                        of all these

and a tag vVERSION, whose message is the notes.

Before: the version stands in `packages/paceline/src/paceline/base/version.py`, CHANGELOG.md has a section `## VERSION (date)`,
and everything is committed. Afterwards a person looks at the folder, pushes the tag and uploads what is in the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SBOM_TOOL = "cyclonedx-bom==7.5.0"


def run(words: Sequence[str | Path]) -> str:
    """Runs a command in the repository and returns what it prints."""
    done = subprocess.run([str(word) for word in words], cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout


def notes_of(changes: str, version: str) -> str:
    """Returns the section of a version; ends the program where there is none, or where it says that it is not released."""
    section = re.search(rf"^## {re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)\n(.*?)(?=^## |\Z)", changes, re.M | re.S)
    if section is None:
        sys.exit(f"CHANGELOG.md has no section `## {version} (YEAR-MONTH-DAY)`: write it, and commit it")
    return section[2].strip() + "\n"


def check_tree(version: str) -> None:
    """Ends the program where what would be released is not what is committed."""
    sys.path.insert(0, str(ROOT / "packages" / "paceline" / "src"))
    from paceline.base.version import VERSION

    if version != VERSION:
        sys.exit(
            f"packages/paceline/src/paceline/base/version.py says {VERSION}, and not {version}: change it, and commit it"
        )
    changed = run(["git", "status", "--porcelain"])
    if changed:
        sys.exit(f"these are not committed:\n{changed}")
    if run(["git", "tag", "--list", f"v{version}"]):
        sys.exit(f"there is a tag v{version} already: choose the next version")


def write_docs(archive: Path) -> None:
    """Builds the pages, strictly, into an archive."""
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder])
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(folder, arcname=archive.name.removesuffix(".tar.gz"))


def write_sbom(wheels: Sequence[Path], path: Path) -> None:
    """Installs the wheels into an empty environment, and lists what came with it."""
    with tempfile.TemporaryDirectory() as folder:
        installed, tool = Path(folder) / "installed", Path(folder) / "tool"
        for environment in (installed, tool):
            run([sys.executable, "-m", "venv", environment])
        constraints = ["-c", ROOT / "constraints.txt"]
        run([installed / "bin/python", "-m", "pip", "install", "--quiet", *constraints, *wheels])
        run([tool / "bin/python", "-m", "pip", "install", "--quiet", SBOM_TOOL])
        project = ROOT / "packages" / "paceline" / "pyproject.toml"
        options = ["--output-reproducible", "--pyproject", project, "--output-file", path]
        run([tool / "bin/cyclonedx-py", "environment", *options, installed / "bin/python"])


def write_checksums(folder: Path) -> None:
    """Writes `SHA256SUMS` in the form that `sha256sum --check` reads."""
    lines = []
    for path in sorted(folder.iterdir()):
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--no-tag", action="store_true", help="for a trial")
    given = parser.parse_args()
    version = given.version
    check_tree(version)
    notes = notes_of((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    folder = ROOT / "dist" / version
    shutil.rmtree(folder, ignore_errors=True)
    # It also runs the quickstart with what is installed from an index, with all dependencies.
    print(run([sys.executable, ROOT / "dev" / "package.py", "--folder", folder]), end="")
    (folder / "NOTES.md").write_text(notes, encoding="utf-8")
    write_docs(folder / f"paceline-{version}-docs.tar.gz")
    write_sbom(sorted(folder.glob("*.whl")), folder / "sbom.cdx.json")
    write_checksums(folder)
    if not given.no_tag:
        run(["git", "tag", "--annotate", f"v{version}", "--cleanup=verbatim", "--message", f"{version}\n\n{notes}"])
    print(f"{folder} is complete. Look at it; then push the tag v{version}, and upload what is in it.")


if __name__ == "__main__":
    main()
