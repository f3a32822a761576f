"""Writes scikit-learn's bundled handwritten digits as image files, 8 x 8 pixels each, and who learns from which.

runs/digits/3_0042.png    the 43rd image, a three
runs/digits/train.txt     names of the images to learn from, one a line
runs/digits/heldout.txt   names of those that are held out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

HELD_OUT = 0.2
SPLIT_SEED = 0  # the split is part of the data: it stays the same whatever seed a training run has


def write(folder: Path) -> tuple[int, int]:
    """Writes images and lists; returns how many there are to learn from and how many are held out."""
    digits = load_digits()
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{label}_{number:04}.png" for number, label in enumerate(digits.target)]
    for name, image in zip(names, digits.images, strict=True):
        Image.fromarray((image * (255 / 16)).round().astype(np.uint8)).save(folder / name)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(names))
    held_out = round(HELD_OUT * len(names))
    for file, part in (("heldout.txt", order[:held_out]), ("train.txt", order[held_out:])):
        (folder / file).write_text("\n".join(names[number] for number in sorted(part)) + "\n")
    return len(names) - held_out, held_out


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=Path("runs/digits"), help="folder to write (default: %(default)s)")
    folder = parser.parse_args().to
    learn, held_out = write(folder)
    print(f"wrote {learn + held_out} handwritten digits to {folder}: {learn} to learn from, {held_out} held out")


if __name__ == "__main__":
    main()
