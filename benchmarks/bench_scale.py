"""Costs as ranks grow, beside torch's own in the same run, each with the exponent with which it grows.

    python benchmarks/bench_scale.py [PART ...] [--sizes 2,4,8] [--rounds 12]

PART: operations (processes over gloo), starting (threads that meet at a store), metadata (worlds that do not exist),
membership (a simulation), and leading (the leader of launchers alone); all of them where none is named.
`docs/concepts/scale.md` says what follows.
"""

from __future__ import annotations

import argparse
import os

import torch
from scale import leading, membership, metadata, operations, starting

PARTS = ("operations", "starting", "metadata", "membership", "leading")


def sizes_of(text: str) -> tuple[int, ...]:
    """`2,4,8` as numbers."""
    return tuple(int(word) for word in text.split(","))


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", default=PARTS, choices=[*PARTS, PARTS])
    parser.add_argument("--sizes", type=sizes_of, default=None, help="numbers of ranks, for the one part that is named")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before\n")
    for part in options.parts:
        print(f"## {part}\n", flush=True)
        if part == "operations":
            print(operations.table(options.sizes or operations.SIZES, options.rounds))
        elif part == "starting":
            print(starting.table(options.sizes or starting.SIZES))
        elif part == "metadata":
            print(metadata.table(options.sizes or metadata.SIZES))
        elif part == "membership":
            print(membership.table(options.sizes or membership.HOSTS))
        else:
            print(leading.table(options.sizes or leading.HOSTS))
        print(flush=True)


if __name__ == "__main__":
    main()
