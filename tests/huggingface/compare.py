"""Runs the programs of this folder under the real accelerate and under Paceline, and compares them step by step.

    make huggingface [ARGS="--only trl --procs 2"]

Two environments are needed, which differ in one thing: the first has accelerate, the second has Paceline in its place.
A case is a program with options. It runs under both at each number of processes; a case that resumes runs a second time,
each library from the checkpoint that the OTHER one saved. All numbers of all ranks are compared: losses, norms, learning
rates, predictions, sums and norms of all weights. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"
# Our AdamW on the CPU steps in one fused kernel, which differs in the last bits of float32 from the one that a script gets.
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Case:
    """One program with its options; `launch` are flags that both launchers know."""

    name: str
    program: str
    options: dict[str, Any] = field(default_factory=dict)
    procs: tuple[int, ...] = (1, 2)
    launch: tuple[str, ...] = ()
    resume: dict[str, Any] | None = None


SAVED = {"save_strategy": "steps", "save_steps": 6}
CASES = [
    Case("clm", "clm"),
    Case(
        "clm accumulation, warm-up, evaluation, best model",
        "clm",
        {
            "gradient_accumulation_steps": 2,
            "warmup_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "load_best_model_at_end": True,
            "save_strategy": "steps",
            "save_steps": 3,
        },
    ),
    Case("clm resume", "clm", SAVED, resume={"resume": "FOLDER/out/checkpoint-6"}),
    Case(
        "clm resume, accumulation",
        "clm",
        SAVED | {"gradient_accumulation_steps": 2},
        resume={"resume": "FOLDER/out/checkpoint-6"},
    ),
    Case("clm bf16", "clm", {"bf16": True}),
    Case("clm bf16 by the launcher", "clm", launch=("--mixed_precision", "bf16")),
    Case("clm gradient checkpointing", "clm", {"gradient_checkpointing": True}),
    Case("clm label smoothing", "clm", {"label_smoothing_factor": 0.1}),
    Case("clm neftune", "clm", {"neftune_noise_alpha": 5.0}),
    Case("clm length grouping", "clm", {"train_sampling_strategy": "group_by_length"}),
    Case("clm dispatch", "clm", {"accelerator_config": {"dispatch_batches": True}}),
    Case("clm split batches", "clm", {"accelerator_config": {"split_batches": True}}),
    Case("clm no even batches", "clm", {"accelerator_config": {"even_batches": False}}),
    Case("clm plain sampler", "clm", {"accelerator_config": {"use_seedable_sampler": False}}),
    Case("clm stream", "clm", {"stream": True}),
    Case("clm stream, dispatch", "clm", {"stream": True, "accelerator_config": {"dispatch_batches": True}}),
    Case("clm workers", "clm", {"dataloader_num_workers": 2}),
    Case("clm drop last", "clm", {"dataloader_drop_last": True}),
    Case("clm compile", "clm", {"torch_compile": True, "max_steps": 4}, procs=(1,)),
    Case("classification", "classification"),
    Case("sequence to sequence", "seq2seq"),
    Case("own loop", "no_trainer", resume={"resume": True}),
    Case(
        "own loop bf16, workers, tensorboard",
        "no_trainer",
        {"mixed_precision": "bf16", "workers": 1, "log_with": "tensorboard"},
    ),
    # Without a resume: the real one then begins again with the first epoch's order, and ours goes on.
    Case("own loop, seedable sampler", "no_trainer", {"loader": {"use_seedable_sampler": True}}),
    Case("own loop, stateful loader", "no_trainer", {"loader": {"use_stateful_dataloader": True}}),
    Case("LoRA", "lora"),
    Case("trl SFT packing", "trl_sft", {"packing": True}),
    Case("trl SFT assistant", "trl_sft", {"assistant_only_loss": True}),
    Case("trl DPO", "trl_dpo"),
    # On two processes the real one ends with an error: its ranks make folders of their own for the data's cache.
    Case("trl DPO precomputed", "trl_dpo", {"precompute_ref_log_probs": True}, procs=(1,)),
    Case("trl GRPO", "trl_grpo"),
    Case("sentence-transformers", "sentences"),
    Case("diffusion", "diffusion"),
]


def differences(ours: Any, real: Any, where: str = "") -> list[tuple[float, str]]:
    """Where two results differ, each with its relative difference (infinite for another shape or kind)."""
    if isinstance(real, dict) and isinstance(ours, dict):
        missing = [f"{where}/{key} is there once" for key in sorted(real.keys() ^ ours.keys())]
        wrong = [(float("inf"), text) for text in missing]
        for key in real.keys() & ours.keys():
            wrong += differences(ours[key], real[key], f"{where}/{key}")
        return wrong
    if "/weights/" in where and isinstance(real, list) and isinstance(ours, list) and real and ours:
        # Sum and norm of a tensor: the sum may be near zero, so that the norm is what a difference is held against.
        scale = max(real[-1], ours[-1], 1e-2)
        largest = max(abs(mine - theirs) for mine, theirs in zip(ours, real, strict=True)) / scale
        return [(largest, f"{where}: {ours} instead of {real}")] if largest else []
    if isinstance(real, list) and isinstance(ours, list):
        if len(real) != len(ours):
            return [(float("inf"), f"{where}: {len(ours)} values, {len(real)} there")]
        wrong = []
        for place, (mine, theirs) in enumerate(zip(ours, real, strict=True)):
            wrong += differences(mine, theirs, f"{where}[{place}]")
        return wrong
    if isinstance(real, int | float) and isinstance(ours, int | float):
        if ours == real:
            return []
        # Sums of many weights may be near zero: what counts there is the size of the weights.
        scale = max(abs(real), abs(ours), 1e-2)
        return [(abs(ours - real) / scale, f"{where}: {ours} instead of {real}")]
    return [] if ours == real else [(float("inf"), f"{where}: {ours!r} instead of {real!r}")]


def command(library: str, python: str, procs: int, case: Case) -> list[str]:
    """How a library's users start a script."""
    bin_folder = Path(python).parent
    if library == "real" and procs > 1:
        # `accelerate launch --cpu --num_processes 2` starts one process; torchrun starts two, and tells them of the CPU below.
        return [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(procs)]
    if library == "real":
        words = [str(bin_folder / "accelerate"), "launch", "--cpu", "--num_machines", "1", "--dynamo_backend", "no"]
        return [*words, "--num_processes", "1", *(case.launch or ("--mixed_precision", "no"))]
    return [str(bin_folder / "paceline"), "launch", "--compat", "accelerate", "--cpu", "-n", str(procs), *case.launch]


def run(
    library: str, python: str, procs: int, case: Case, folder: Path, more: dict[str, Any]
) -> tuple[list[Any], float]:
    """One run: what each rank wrote, and the seconds from the command to its end."""
    for old in folder.glob("rank_*.json"):
        old.unlink()
    options = {**case.options, **more}
    words = [
        *command(library, python, procs, case),
        str(PROGRAMS / f"{case.program}.py"),
        str(folder),
        json.dumps(options),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["ACCELERATE_USE_CPU"] = "true"
    if case.launch:
        environment["ACCELERATE_MIXED_PRECISION"] = case.launch[1]
    environment |= {"PYTHONHASHSEED": "0", "HF_HOME": str(folder.parent / "hf")}
    begin = time.perf_counter()
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False, cwd=folder)
    seconds = time.perf_counter() - begin
    (folder / "output.txt").write_text(ended.stdout + ended.stderr, encoding="utf-8")
    if ended.returncode:
        raise RuntimeError(
            f"{library}: exit code {ended.returncode}\n" + "\n".join((ended.stdout + ended.stderr).splitlines()[-12:])
        )
    return [json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in range(procs)], seconds


def compare(case: Case, procs: int, pythons: dict[str, str], folder: Path) -> tuple[str, list[str]]:
    """A row of the table, and what differs."""
    folders = {library: folder / library for library in pythons}
    for each in folders.values():
        each.mkdir(parents=True)
    results, seconds = {}, {}
    for library, python in pythons.items():
        results[library], seconds[library] = run(library, python, procs, case, folders[library], {})
    wrong = differences(results["ours"], results["real"])
    if case.resume is not None:
        # Each goes on from the other's checkpoint.
        aside = folder / "aside"
        shutil.move(folders["real"], aside)
        shutil.move(folders["ours"], folders["real"])
        shutil.move(aside, folders["ours"])
        for library, python in pythons.items():
            results[library], _ = run(library, python, procs, case, folders[library], case.resume)
        wrong += [(size, f"resumed{text}") for size, text in differences(results["ours"], results["real"])]
    largest = max((size for size, _ in wrong), default=0.0)
    too_large = [text for size, text in sorted(wrong, reverse=True) if size > TOLERANCE]
    row = f"{seconds['real']:.1f} | {seconds['ours']:.1f} | {largest:.1e}"
    return row, too_large


def main() -> int:
    """Prints a table as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", default=".venv-hf-real/bin/python", help="the Python that has accelerate")
    parser.add_argument("--ours", default=".venv-hf-ours/bin/python", help="the Python that has Paceline")
    parser.add_argument("--only", default="", help="only cases with this text in their names")
    parser.add_argument("--procs", type=int, help="only this number of processes")
    parser.add_argument("--keep", help="a folder for everything that the runs write")
    args = parser.parse_args()
    pythons = {"real": os.path.abspath(args.real), "ours": os.path.abspath(args.ours)}
    base = Path(args.keep or tempfile.mkdtemp())
    failed = 0
    print("| case | processes | seconds, real | seconds, ours | largest difference | |\n|---|---|---|---|---|---|")
    for case in CASES:
        if args.only not in case.name:
            continue
        for procs in case.procs:
            if args.procs not in (None, procs):
                continue
            folder = base / f"{case.name.replace(' ', '_').replace(',', '')}_{procs}"
            shutil.rmtree(folder, ignore_errors=True)
            try:
                row, wrong = compare(case, procs, pythons, folder)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                row, wrong = "| | ", [str(error)]
            failed += bool(wrong)
            print(f"| {case.name} | {procs} | {row} | {'DIFFERS' if wrong else 'same'} |", flush=True)
            for text in wrong[:6]:
                print(f"    {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
