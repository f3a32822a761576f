"""Writes the handwritten digits of scikit-learn as image files of 8 x 8 pixels, and lists for training and evaluation.

runs/digits/3_0042.png    the 43rd image, a three
runs/digits/train.txt     names of the images for training, one in each line
runs/digits/heldout.txt   names of the images for evaluation
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

HELD_OUT = 0.2
SPLIT_SEED = 0  # the split is part of the data, so it does not change with the seed of a run


def write(folder: Path) -> tuple[int, int]:
    """Writes images and lists; returns the numbers of images for training and for evaluation."""
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
