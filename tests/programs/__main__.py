"""Runs the programs of the table under the real library and under Paceline, and compares the losses of each rank.

    make programs FOLDER=clones [ARGS="--only gan"]

FOLDER has one clone a repository, by its name (`clones/DeepSpeedExamples`); a program whose clone is not there is skipped,
with that reason. A program runs in a copy of its folder, unchanged, with `shim/` before everything else that Python imports.
Writes `programs.md`, and exits with 1 if an outcome is not the one that the table expects.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from free_ports import free_port
from safetensors.torch import load_file

from programs import inputs
from programs.table import PROGRAMS, Program

HERE = Path(__file__).parent
TIME = r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d"  # of a folder that is named by when the program ran
# Rows with one of these are compared with the real accelerate as it runs on GPUs.
ENGINES = {
    *("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"),
    "ACCELERATE_TORCH_DEVICE",
}
NEVER = 1e-12  # below it a loss counts as this, so that a difference can be relative


@dataclass(frozen=True)
class Ended:
    """How one run ended.

    Attributes:
        code: exit status; -1 if it was ended by us.
        losses: of each rank, in the order of the calls.
        output: all that it printed.
        tensors: what the files contain that it wrote, by file and name.
        cpu_s: time of a core that all of its processes took, from start to end.
    """

    code: int
    losses: dict[str, list[float]]
    output: str
    tensors: dict[str, torch.Tensor]
    cpu_s: float

    @property
    def error(self) -> str:
        """The code of a coded error; "" if there is none."""
        # At the end of a line and after two spaces; a traceback may show another `[arg-type]` in a line of code.
        codes = re.findall(r"  \[([a-z]+(?:-[a-z0-9]+)+)\]$", self.output, re.MULTILINE)
        # The launcher's own error comes last; it says only that a rank has failed.
        coded = [code for code in codes if code != "rank-failed"]
        return coded[0] if coded and self.code else ""


def run(program: Program, side: str, procs: int, args: argparse.Namespace) -> Ended:
    """Runs a program under one library."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "program"
        clone = Path(args.folder) / program.repository.partition("/")[2]
        shutil.copytree(clone / program.folder, folder)
        record = Path(scratch) / "record"
        record.mkdir()
        for name in program.inputs:
            getattr(inputs, name)(folder)
        given = set(folder.rglob("*"))
        before = [str(HERE / "shim"), *args.libraries.split(os.pathsep)]
        if side == "real":
            uses_deepspeed = program.library == "deepspeed" or "ACCELERATE_USE_DEEPSPEED" in program.env
            before.append(args.deepspeed if uses_deepspeed else "")
            # A program for DeepSpeed may import accelerate, too: transformers' Trainer does.
            before.append(args.accelerate if program.library != "torchrun" else "")
        else:
            before += map(str, sorted((HERE.parents[1] / "packages").glob("*/src")))
        if program.library != "deepspeed":
            before.append(str(clone))  # programs of these repositories import from there
        variables = {
            **os.environ,
            **program.env,
            "DS_ACCELERATOR": "cpu",
            "HF_DATASETS_CACHE": str(
                Path(scratch) / "datasets"
            ),  # else `datasets` takes what a folder of this name had before
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",  # some programs draw by the order of a set
            "PROGRAMS_RECORD": str(record),
            "PROGRAMS_SAMPLES": str(program.samples),
            "PYTHONPATH": os.pathsep.join(filter(None, before)),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        if program.library == "accelerate" and not ENGINES & program.env.keys():
            variables["ACCELERATE_USE_CPU"] = "true"
        elif program.library == "accelerate":
            # With that variable the real library would leave its engines out. The shim gives it a "GPU" that is the CPU.
            variables |= {"ACCELERATE_TORCH_DEVICE": "cpu", "PROGRAMS_ENGINE": "1" if side == "real" else ""}
        command = [sys.executable, "-m", *starting(program.library, side, procs), *program.command]
        used = _cpu_of_children()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        code = -1
        try:
            output, _ = process.communicate(timeout=args.limit_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            # The launcher ends its processes, which have sessions of their own; killed at once it would leave them behind.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                output, _ = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
        used = _cpu_of_children() - used
        if args.logs:
            log = Path(args.logs) / f"{program.name.replace(' ', '-')}-{procs}-{side}.log"
            log.write_text(output, encoding="utf-8")
        losses: dict[str, list[float]] = {}
        for file in sorted(record.iterdir()):
            losses[file.stem] = [float(line) for line in file.read_text().split()]
        tensors = {}
        if program.weights and not code:
            tensors = written(folder, given)
        return Ended(code, losses, output, tensors, used)


def _cpu_of_children() -> float:
    """Returns the seconds of a core that processes took which were started here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def starting(library: str, side: str, procs: int) -> list[str]:
    """Returns the module that starts a program, and its flags."""
    # The real launchers all take port 29500, so that two rows which run at once would meet there. Ours takes a free one.
    if library == "deepspeed":
        real = ["deepspeed.launcher.runner", "--master_port", str(free_port())]
        module = real if side == "real" else ["paceline", "deepspeed"]
        return [*module, "--num_gpus", str(procs)]
    if side == "real":
        return ["torch.distributed.run", "--master-port", str(free_port()), "--nproc-per-node", str(procs)]
    names = ["--compat", "accelerate"] if library == "accelerate" else []
    return ["paceline", "launch", "--cpu", "--procs", str(procs), *names]


def written(folder: Path, given: set[Path]) -> dict[str, torch.Tensor]:
    """Returns the tensors in the files that a program has written."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(set(folder.rglob("*")) - given):
        name = re.sub(TIME, "TIME", str(path.relative_to(folder)))
        # `save_state` of ours writes the weights a second time, for older scripts; docs/migrating-from-accelerate.md says so.
        twin = path.with_name(path.name.replace("pytorch_model", "model")).with_suffix(".safetensors")
        if path.suffix == ".bin" and path.name.startswith("pytorch_model") and twin.exists():
            continue
        # How a loader counts where it is, and how DeepSpeed's engine divides what it saves, is each library's own.
        if path.name.startswith("dl_state_dict") or path.name.endswith(("_model_states.pt", "_optim_states.pt")):
            continue
        if path.suffix == ".safetensors":
            flatten(load_file(path), name, tensors)
        elif path.suffix in (".pt", ".pth", ".bin", ".ckpt") or path.name.endswith(".pth.tar"):
            # Arguments of a training need the program's own classes, and are no weights.
            with suppress(ImportError, AttributeError):
                flatten(torch.load(path, map_location="cpu", weights_only=False), name, tensors)
    return tensors


def flatten(value: object, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Adds the tensors of nested dicts and lists under their names."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().double()
    elif isinstance(value, dict):
        for key, entry in value.items():
            flatten(entry, f"{name} {key}", tensors)
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            flatten(entry, f"{name} {number}", tensors)


def weights_differ(real: Ended, ours: Ended, tolerance: float) -> str:
    """Returns the first tensor that differs, or ""."""
    if real.tensors.keys() != ours.tensors.keys():
        there = sorted(real.tensors.keys() - ours.tensors.keys())
        here = sorted(ours.tensors.keys() - real.tensors.keys())
        return f"files: {len(there)} tensors only there {there[:2]}, {len(here)} only here {here[:2]}"
    for name, tensor in real.tensors.items():
        other = ours.tensors[name]
        if tensor.shape != other.shape or not torch.allclose(tensor, other, rtol=tolerance * 10, atol=tolerance):
            return name
    return ""


def difference(real: Ended, ours: Ended) -> float | None:
    """Returns the largest relative difference of a loss; None if the ranks have not computed as many losses.

    Where all ranks have as many, their mean is compared: which rank reads which rows of a batch is each library's own.
    """
    if {rank: len(losses) for rank, losses in real.losses.items()} != {
        rank: len(losses) for rank, losses in ours.losses.items()
    }:
        return None
    expected = _means(real)
    largest = 0.0
    for name, values in _means(ours).items():
        for a, b in zip(expected[name], values, strict=True):
            largest = max(largest, abs(a - b) / max(abs(a), NEVER))
    return largest


def _means(ended: Ended) -> dict[str, list[float]]:
    """Returns the mean of the ranks' losses if these have equal lengths, and otherwise the losses of each rank."""
    if len({len(losses) for losses in ended.losses.values()}) != 1:
        return ended.losses
    steps = zip(*ended.losses.values(), strict=True)
    return {"mean": [sum(losses) / len(losses) for losses in steps]}


def until_its_end(real: Ended, ours: Ended) -> str:
    """Returns how the losses compare that the real library computed before it failed."""
    largest = 0.0
    num_losses = 0
    for rank, losses in real.losses.items():
        for expected, value in zip(losses, ours.losses.get(rank, []), strict=False):
            largest = max(largest, abs(expected - value) / max(abs(expected), NEVER))
            num_losses += 1
    return f"{num_losses} losses before it, within {largest:.1e}"


def outcome(program: Program, real: Ended, ours: Ended) -> tuple[str, str]:
    """Returns what came out, in the words of the table, and the details."""
    last = (ours.output.strip().splitlines() or [""])[-1]
    if ours.code:
        kind = f"refused {ours.error}" if ours.error else "failed"
        return ("own fault" if real.code and not ours.error else kind), last
    if real.code:
        return "own fault", f"{until_its_end(real, ours)}; {(real.output.strip().splitlines() or [''])[-1]}"
    largest = difference(real, ours)
    if largest is None:
        counts = [{rank: len(losses) for rank, losses in ended.losses.items()} for ended in (real, ours)]
        return "failed", f"losses by rank: {counts[0]} there, {counts[1]} here"
    num_losses = sum(map(len, real.losses.values()))
    if not num_losses:
        return "failed", "no loss was recorded"
    details = f"{num_losses} losses, within {largest:.1e}"
    if program.weights:
        different = weights_differ(real, ours, program.tolerance)
        if different:
            return "failed", f"{details}; another {different}"
        details += f"; {len(real.tensors)} saved tensors"
    details += f"; {real.cpu_s:.0f} s of a core there, {ours.cpu_s:.0f} s here"
    return ("equal" if largest <= program.tolerance else "differs"), details


def is_expected(program: Program, found: str) -> bool:
    """Returns whether an outcome is the one of the table."""
    return found == program.expected or (program.expected == "refused" and found.startswith("refused "))


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="has the clones")
    parser.add_argument("--libraries", default="", help="a folder of packages that the programs need, for both sides")
    parser.add_argument("--deepspeed", default="", help="a folder of packages with the real DeepSpeed")
    parser.add_argument("--accelerate", default="", help="a folder of packages with the real accelerate")
    parser.add_argument("--only", default="", help="parts of names, with commas between them")
    parser.add_argument("--procs", type=int, help="only this number of processes")
    parser.add_argument("--library", default="", help="only programs of this one: deepspeed, accelerate or torchrun")
    parser.add_argument("--logs", default="", help="a folder for what the programs print")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds of one run, after which it is ended")
    parser.add_argument("--report", default="programs.md")
    args = parser.parse_args()
    if args.accelerate:
        sys.path.append(args.accelerate)  # libraries that make models for `inputs` import it
    rows: list[str] = []
    counts: Counter[str] = Counter()
    unexpected = 0
    for program in PROGRAMS:
        wanted = any(part in program.name for part in args.only.split(","))
        if not wanted or args.library not in program.library:
            continue
        clone = Path(args.folder) / program.repository.partition("/")[2]
        if not (clone / program.folder).is_dir():
            print(f"skipped  {program.name}: {clone / program.folder} is not there")
            counts["skipped"] += 1
            continue
        for procs in program.procs:
            if args.procs not in (None, procs):
                continue
            found, details = outcome(program, run(program, "real", procs, args), run(program, "ours", procs, args))
            counts[found.partition(" ")[0] if found != "own fault" else found] += 1
            mark = "" if is_expected(program, found) else "  <-- not expected"
            unexpected += bool(mark)
            print(f"{found}  {program.name}, {procs} processes: {details}{mark}", flush=True)
            rows.append(f"| {program.name} | {procs} | {found} | {details.replace('|', '/')} |")
    summary = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    header = ["| program | processes | outcome | details |", "|---|---|---|---|"]
    Path(args.report).write_text("\n".join([f"{summary}.", "", *header, *rows]) + "\n", encoding="utf-8")
    print(summary)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
