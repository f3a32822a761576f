"""Builds the wheels and sdists of all parts, installs them into an empty environment, and runs the quickstart there.

python dev/package.py [--folder dist] [--borrow]

--folder    where the wheels and sdists are written; the environments are in a temporary folder
--borrow    dependencies are those of the Python that runs this program, and none is downloaded: seconds in place of minutes
"""

from __future__ import annotations

import argparse
import os
import site
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = sorted(path.name for path in (ROOT / "packages").iterdir())


def run(words: Sequence[str | Path], folder: Path) -> str:
    """Runs a command without this program's search paths, and returns what it prints; ends the program if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, env=environment, text=True, capture_output=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(part: str, folder: Path) -> tuple[Path, Path]:
    """Builds both from the working tree; returns the wheel and the sdist."""
    folder.mkdir(parents=True, exist_ok=True)
    name = part.replace("-", "_")
    for old in (*folder.glob(f"{name}-*.whl"), *folder.glob(f"{name}-*.tar.gz")):
        old.unlink()
    run([sys.executable, "-m", "hatchling", "build", "-d", folder], ROOT / "packages" / part)
    (wheel,), (sdist,) = folder.glob(f"{name}-*.whl"), folder.glob(f"{name}-*[0-9].tar.gz")
    return wheel, sdist


def wheel_of_sdist(sdist: Path, folder: Path) -> Path:
    """Builds a wheel from the unpacked sdist, as pip does where it takes the sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], unpacked)
    (wheel,) = (unpacked / "dist").glob("*.whl")
    return wheel


def files_of(wheel: Path) -> dict[str, int]:
    """Name of each file of a wheel -> its checksum."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def install(wheels: Sequence[Path], environment: Path, *, borrow: bool) -> Path:
    """Makes an environment that contains the wheels, and returns its folder of commands."""
    run([sys.executable, "-m", "venv", *(["--without-pip"] if borrow else []), environment], ROOT)
    python = environment / "bin" / "python"
    if not borrow:
        needed = ["matplotlib", "pillow", "scikit-learn", "tqdm"]  # by the quickstart
        run([python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *wheels, *needed], ROOT)
        return python.parent
    run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", *wheels],
        ROOT,
    )
    (packages,) = environment.glob("lib/python*/site-packages")
    # Searched last. An editable installation of Paceline in these folders is not found: its own `.pth` file is not read here.
    # But its entry points would be: links to everything else are borrowed.
    borrowed = environment / "borrowed"
    borrowed.mkdir()
    for folder in site.getsitepackages():
        for entry in Path(folder).iterdir():
            if not entry.name.startswith(("paceline", "_editable_impl_paceline")):
                (borrowed / entry.name).symlink_to(entry)
    (packages / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")
    return python.parent


def check(commands: Path, folder: Path) -> None:
    """Runs the quickstart with what is installed, on 2 processes, and looks where Paceline came from."""
    program = "import paceline; print(paceline.__file__)"
    origin = Path(run([commands / "python", "-c", program], folder).strip())
    if not origin.is_relative_to(commands.parent):
        sys.exit(f"the installed package is not the one that was imported, but {origin}")
    quickstart = ROOT / "examples" / "quickstart"
    for name in ("make_digits.py", "train.py", "report.py"):
        (folder / name).write_bytes((quickstart / name).read_bytes())
    run([commands / "python", "make_digits.py"], folder)
    words = [commands / "paceline", "launch", "--cpu", "--procs", "2", "train.py", "--epochs", "1"]
    print(run(words, folder), end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "dist")
    parser.add_argument("--borrow", action="store_true")
    given = parser.parse_args()
    wheels: list[Path] = []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for part in PARTS:
            wheel, sdist = build(part, given.folder.resolve())
            wheels.append(wheel)
            unpacked = place / "unpacked" / part
            unpacked.mkdir(parents=True)
            rebuilt = files_of(wheel_of_sdist(sdist, unpacked))
            differing = dict(files_of(wheel).items() ^ rebuilt.items())
            if differing:
                sys.exit(f"the wheel of the sdist differs in {sorted(differing)}")
        commands = install(wheels, place / "environment", borrow=given.borrow)
        (place / "run").mkdir()
        check(commands, place / "run")
    names = ", ".join(wheel.name for wheel in wheels)
    print(f"{names} and their sdists are in {given.folder}; the quickstart ran with what they install.")


if __name__ == "__main__":
    main()
