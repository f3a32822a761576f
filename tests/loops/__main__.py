"""`python -m loops --seeds 1000`: draws programs, runs them under every plan, shrinks what fails, and writes a report."""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import get_args

import torch
from loops.check import DOORS, PLANS, Case, cases_of_door, check, references
from loops.compare import Outcome
from loops.draw import draw
from loops.draw_low import KINDS
from loops.programs import Forward, Program, Statement, statements, uses
from loops.report import Tally, page
from loops.script import standalone
from loops.shrink import shrink

_CHUNK = 24  # programs that one process draws and runs together


def main() -> int:
    options = _options()
    seeds = range(options.start, options.start + options.seeds)
    chunks = [seeds[begin : begin + _CHUNK] for begin in range(0, len(seeds), _CHUNK)]
    tally = Tally()
    begin = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "failures.txt").write_text("")
    _load_for_all()
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
        running = [
            pool.submit(
                run_chunk,
                chunk,
                options.widths,
                options.plans,
                options.shuffle,
                options.using,
                options.door,
                options.in_turn,
            )
            for chunk in chunks
        ]
        for number, future in enumerate(running, 1):
            seconds = time.monotonic() - begin
            if options.minutes is not None and seconds > 60 * options.minutes and future.cancel():
                continue
            own = future.result()
            tally.merge(own)
            _note(own.failures, options.output / "failures.txt")
            (options.output / "report.md").write_text(_report(tally, options))
            seconds = time.monotonic() - begin
            failed = tally.total("failed")
            done = (
                f"{number * _CHUNK} seeds, {tally.cases} cases, {failed} failed, {tally.cases / seconds:.1f} a second"
            )
            print(done, file=sys.stderr, flush=True)
        for case, result in _one_of_each(tally.failures)[: options.shrink]:
            pool.submit(_write_smallest, case, result, options.output)
    print(_report(tally, options))
    return 1 if tally.failures else 0


def _load_for_all() -> None:
    """Loads what half of the ranks need, before they are forked: each would take a second for it."""
    torch.compile(len)
    for name in ("torchao.optim", "torchao.float8", "torchao.prototype.moe_training.mxfp8_linear"):
        importlib.import_module(name)


def _report(tally: Tally, options: argparse.Namespace) -> str:
    """The report of what was run so far."""
    return page(tally, f"Programs drawn at random, {time.strftime('%Y-%m-%d')}", "make loops " + _as_make(options))


def run_chunk(
    seeds: Sequence[int],
    widths: Sequence[int],
    plans: Sequence[str],
    shuffle: bool,
    using: str = "",
    door: str = "",
    in_turn: bool = False,
) -> Tally:
    """Draws and runs the programs of some seeds; with `using`, only those that have a statement of this name.

    Args:
        in_turn: on more than two ranks, each program runs under one plan of each width.
    """
    kind = "none" if door else using if using in KINDS else ""
    programs = [draw(seed, shuffle, kind) for seed in seeds]
    if using and using not in KINDS:
        programs = [program for program in programs if _has(program, using)]
    programs = [program for program in map(DOORS[door].adapted, programs) if program is not None]
    wants = references(programs, door)
    valid = [program for program, want in zip(programs, wants, strict=True) if want is not None]
    cases = []
    for program in valid:
        own = cases_of_door(door, program, widths, plans)
        cases += _in_turn(own) if in_turn else own
    tally = Tally(programs=len(valid), unclear=len(programs) - len(valid))
    tally.add(cases, check(cases, dict(zip(programs, wants, strict=True))))
    return tally


def _in_turn(cases: Sequence[Case]) -> list[Case]:
    chosen = [case for case in cases if case.world <= 2]
    for world in sorted({case.world for case in cases} - {1, 2}):
        wide = [case for case in cases if case.world == world]
        chosen.append(wide[wide[0].program.seed % len(wide)])
    return chosen


def _has(program: Program, name: str) -> bool:
    """Whether a program has a statement of this name, or a part or a way that `parts` names."""
    kinds = [kind for kind in get_args(Statement) if kind.__name__ == name]
    parts = {
        "Hook": bool(program.hooks),
        "Kept": bool(program.loop.again),
        "Loose": program.loose,
        "Begun": program.begun > 0,
        "AveragedCopy": bool(program.averages),
        "Penalty": any(isinstance(each, Forward) and each.penalty for each in statements(program.body)),
        "Apart": program.apart,
        "Afterwards": bool(program.afterwards),
        "PlainSave": program.plain_save,
        "KeptSave": bool(program.loop.again) and program.save_at is not None,
        "Low": program.precision in ("bf16", "fp16"),
    }
    return parts.get(name, False) or any(uses(program, kind) for kind in kinds)


def _note(failures: Sequence[tuple[Case, Outcome]], path: Path) -> None:
    """Adds failures to a file as soon as they are known: a run may take hours."""
    with path.open("a") as file:
        for case, result in failures:
            file.write(f"{case.name}: {result.what}: {(result.detail.splitlines() or [''])[0]}\n")


def _one_of_each(failures: Sequence[tuple[Case, Outcome]]) -> list[tuple[Case, Outcome]]:
    """The failures with other words each first, and of one seed only one."""
    seen: set[object] = set()
    ordered = []
    for case, result in failures:
        if case.program.seed not in seen:
            seen.add(case.program.seed)
            ordered.append((result.what in seen, case, result))
            seen.add(result.what)
    return [(case, result) for _, case, result in sorted(ordered, key=lambda entry: entry[0])]


def _write_smallest(case: Case, result: Outcome, folder: Path) -> None:
    (again,) = check([case])
    folder.mkdir(parents=True, exist_ok=True)
    if again is None or not again.same_way(result):
        with (folder / "not-again.txt").open("a") as file:
            file.write(f"{case.name}: {result.what}, then {again}\n")
        return
    smallest, smallest_result = shrink(case, result)
    (folder / f"{case.name}.py").write_text(standalone(smallest, smallest_result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="loops", description=__doc__)
    names = sorted({plan for plans in PLANS.values() for plan in plans})
    parser.add_argument("--seeds", type=int, default=100, help="number of programs")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--widths", type=_numbers, default=[1, 2, 3, 4], help="numbers of ranks: 1,2")
    parser.add_argument("--plans", type=_words, default=[], help=f"some of {', '.join(names)}")
    parser.add_argument("--in-turn", action="store_true", help="on more than two ranks, one plan for each program")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="groups of ranks at the same time")
    parser.add_argument("--shrink", type=int, default=5, help="how many failures are made smaller")
    parser.add_argument(
        "--using",
        default="",
        help="only programs that have this statement, such as Write; "
        f"or draws only programs of this kind: {', '.join(KINDS)}",
    )
    parser.add_argument("--door", choices=list(DOORS), default="", help="through the names of another library")
    parser.add_argument("--minutes", type=float, help="programs that have not begun by then are left out")
    parser.add_argument("--shuffle", action="store_true", help="loaders may shuffle")
    parser.add_argument(
        "--output", type=Path, default=Path("loops"), help="folder of the report and of smallest scripts"
    )
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _words(text: str) -> list[str]:
    return [word for word in text.replace(",", " ").split() if word]


def _as_make(options: argparse.Namespace) -> str:
    words = [f"SEEDS={options.seeds}", f"START={options.start}"]
    if options.plans:
        words.append(f"PLANS={','.join(options.plans)}")
    if options.using:
        words.append(f'ARGS="--using {options.using}"')
    if options.door:
        words.append(f'ARGS="--door {options.door}"')
    return " ".join([*words, f"WIDTHS={','.join(map(str, options.widths))}"])


if __name__ == "__main__":
    sys.exit(main())
