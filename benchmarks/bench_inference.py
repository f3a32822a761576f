"""Tokens a second of a model whose weights wait in memory or on the disk, beside accelerate's, in the same run.

    python benchmarks/bench_inference.py --peer /path/to/an/environment/with/accelerate/bin/python

Each side is a process of its own that stays, and they take turns. Both load the same synthetic weights (random ones from a
config of transformers) and generate greedily; the tokens must be the same. With --door our side runs accelerate's calls too,
under its names. The execution device is the CPU. Ratios are of each turn, by the clock and by the CPU time of all threads,
which other work on the machine hardly changes. Cases:

    memory       all weights in memory
    cpu          accelerate's `cpu_offload`; here "cpu", where nothing has to be copied
    disk         all weights on the disk, the page cache warm: `disk_offload`; here "disk"
    half         every second block on the disk, warm: `dispatch_model`; here a map
    device_map   all blocks on the disk, warm: transformers' `from_pretrained(device_map=...)`; here a map
    disk, cold   the first two tokens after the files were dropped from the page cache
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

CASES = ["memory", "cpu", "disk", "half", "device_map", "disk, cold"]
PROMPT, COLD_TOKENS = 16, 2


def config_of(kind: str) -> Any:
    """A config of about 200 MB in float32."""
    from transformers import GPT2Config, LlamaConfig

    if kind == "gpt2":
        return GPT2Config(n_layer=12, n_embd=512, n_head=8, vocab_size=16000, bos_token_id=0, eos_token_id=0)
    return LlamaConfig(
        num_hidden_layers=12, hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=16000, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def layers_of(kind: str) -> str:
    """Name of the list of blocks."""
    return "transformer.h" if kind == "gpt2" else "model.layers"


# -- one side ------------------------------------------------------------------------------------------------------


def places_of(kind: str, case: str) -> dict[str, str]:
    """For `half`: every second block on the disk; for `device_map` all blocks."""
    if case not in ("half", "device_map"):
        return {"": "cpu" if case in ("memory", "cpu") else "disk"}
    on_disk = range(1, 12, 2) if case == "half" else range(12)
    return {"": "cpu"} | {f"{layers_of(kind)}.{index}": "disk" for index in on_disk}


def whole_map(model: Any, kind: str, case: str) -> dict[str, str]:
    """The same as a device map of accelerate, which names each part of the model once."""
    layers = layers_of(kind)
    inner = layers.rpartition(".")[0]
    places = {name: "cpu" for name, child in model.named_children() if name == "lm_head"}
    for name, _ in model.get_submodule(inner).named_children():
        if f"{inner}.{name}" != layers:
            places[f"{inner}.{name}"] = "cpu"
    for index in range(12):
        places[f"{layers}.{index}"] = "cpu"
    return places | {name: place for name, place in places_of(kind, case).items() if name}


def load_ours(kind: str, case: str, folder: str) -> tuple[Any, list[Path]]:
    """The model, and the files that it reads while it computes."""
    from transformers import AutoModelForCausalLM

    from paceline_large import inference

    model = inference.load(
        lambda: AutoModelForCausalLM.from_config(config_of(kind)), folder, placement=places_of(kind, case)
    )
    return model, [Path(folder, "model.safetensors")]


def load_door(kind: str, case: str, folder: str) -> tuple[Any, list[Path]]:
    """The same through accelerate's names."""
    from paceline.compat import install

    install(["accelerate"])
    return load_peer(kind, case, folder)


def load_peer(kind: str, case: str, folder: str) -> tuple[Any, list[Path]]:
    """The same by accelerate."""
    import accelerate
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    cpu, offload_folder = torch.device("cpu"), Path(folder, "peer")
    if case == "cpu":
        accelerate.cpu_offload(model, cpu)
    elif case.startswith("disk"):
        accelerate.disk_offload(model, offload_folder, cpu)
    elif case == "half":
        places = whole_map(model, kind, case)
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(Path(folder, "peer_half")))
    elif case == "device_map":
        places = whole_map(model, kind, case)
        model = AutoModelForCausalLM.from_pretrained(
            folder, device_map=places, offload_folder=str(Path(folder, "peer_map"))
        ).eval()
    return model, sorted(offload_folder.glob("*.dat"))


def evict(files: list[Path]) -> None:
    """Drops files from the page cache: pages that no process has mapped."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def serve(side: str, kind: str, folder: str, num_tokens: int) -> None:
    """Answers each line that names a case with the seconds and the tokens of one generation."""
    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    load = {"ours": load_ours, "door": load_door, "peer": load_peer}[side]
    ids = torch.arange(1, PROMPT + 1)[None]
    models: dict[str, tuple[Any, list[Path]]] = {}

    def generate(model: Any, count: int) -> tuple[float, float, list[int]]:
        start, cpu_start = time.perf_counter(), time.process_time()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        return time.perf_counter() - start, time.process_time() - cpu_start, out[0].tolist()

    print("ready", flush=True)
    for line in sys.stdin:
        case = line.strip()
        cold = case == "disk, cold"
        if cold:
            # Only the weights on the disk are to be read again: the code and the libraries are warm.
            models.clear()
            gc.collect()
        if case not in models:
            models = {case: load(kind, case, folder)}
            if not cold:
                generate(models[case][0], 2)
        model, files = models[case]
        if cold:
            evict(files)
        seconds, cpu_seconds, tokens = generate(model, COLD_TOKENS if cold else num_tokens)
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens}), flush=True)


# -- both sides ----------------------------------------------------------------------------------------------------


class Side:
    """A process that generates when it is asked to."""

    def __init__(self, python: str, side: str, kind: str, folder: str, num_tokens: int) -> None:
        words = [python, __file__, "--serve", side, "--kind", kind, "--folder", folder, "--tokens", str(num_tokens)]
        errors = open(Path(folder, f"{side}.log"), "w")  # noqa: SIM115  (the process keeps it)
        self._log = errors.name
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._read()

    def _read(self) -> str:
        for line in cast(IO[str], self._process.stdout):
            if line.startswith(("{", "ready")):
                return line
        raise SystemExit(Path(self._log).read_text()[-2000:])

    def generate(self, case: str) -> dict[str, Any]:
        """Seconds, seconds of CPU time (all threads) and tokens of one turn."""
        stdin = cast(IO[str], self._process.stdin)
        stdin.write(f"{case}\n")
        stdin.flush()
        return cast(dict[str, Any], json.loads(self._read()))

    def close(self) -> None:
        """Ends the process."""
        cast(IO[str], self._process.stdin).close()
        self._process.wait()


def compare(ours: Side, peer: Side, case: str, turns: int, num_tokens: int) -> str:
    """One row: tokens a second of both, and how many times as many ours are, by the clock and by CPU time."""
    count = COLD_TOKENS if case == "disk, cold" else num_tokens
    own_rates: list[float] = []
    peer_rates: list[float] = []
    by_clock: list[float] = []
    by_cpu_time: list[float] = []
    for turn in range(turns):
        first, second = (ours, peer) if turn % 2 else (peer, ours)
        answers = {first: first.generate(case), second: second.generate(case)}
        own, other = answers[ours], answers[peer]
        if own["tokens"] != other["tokens"]:
            raise SystemExit(f"{case}: other tokens: {own['tokens']} and {other['tokens']}")
        own_rates.append(count / own["seconds"])
        peer_rates.append(count / other["seconds"])
        by_clock.append(other["seconds"] / own["seconds"])
        by_cpu_time.append(other["cpu_seconds"] / own["cpu_seconds"])
    must = "1.3" if case in ("cpu", "disk", "device_map") else ""
    rates = f"{statistics.median(own_rates):.1f} | {statistics.median(peer_rates):.1f}"
    return f"| {case} | {rates} | {spread(by_clock)} | {spread(by_cpu_time)} | {must} |"


def spread(ratios: list[float]) -> str:
    """The median, and the quartiles."""
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    return f"{statistics.median(ordered):.2f} ({ordered[quarter]:.2f} .. {ordered[-1 - quarter]:.2f})"


def write_weights(kind: str, folder: str) -> int:
    """Random weights, and their bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(kind)).save_pretrained(folder)
    return os.path.getsize(Path(folder, "model.safetensors"))


def forecast_row(kind: str, folder: str) -> str:
    """What a placement foretells of a pass over one token, from measured rates."""
    from transformers import AutoModelForCausalLM

    from paceline_large import inference

    rates = inference.measure_rates("cpu", Path(folder, "model.safetensors"))
    placement = inference.plan(
        lambda: AutoModelForCausalLM.from_config(config_of(kind)), folder, placement="disk", rates=rates
    )
    return f"forecast of a pass over one token, by measured rates: at least {placement.pass_seconds() * 1e3:.1f} ms"


def main() -> None:
    """Prints a table for each kind of model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that has accelerate and transformers")
    parser.add_argument("--kinds", nargs="+", default=["gpt2", "llama"])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--door", action="store_true", help="the script is accelerate's, served by Paceline's names")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.kind, given.folder, given.tokens)
        return
    if not given.peer:
        parser.error("name the Python of an environment with accelerate: --peer PATH")
    import torch

    versions = "import accelerate, torch; print(f'accelerate {accelerate.__version__} with torch {torch.__version__}')"
    peer = subprocess.run([given.peer, "-c", versions], capture_output=True, text=True, check=True).stdout.strip()
    print(f"torch {torch.__version__}, {peer}, Python {platform.python_version()}, one thread, {given.turns} turns")
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as folder:
            nbytes = write_weights(kind, folder)
            print(f"\n{kind}, {nbytes / 1e6:.0f} MB of weights; {given.tokens} tokens after {PROMPT}\n")
            print(
                "| case | tokens/s | accelerate | times as many | by CPU time | at least |\n|---|---|---|---|---|---|"
            )
            make: Callable[[str, str], Side] = lambda python, side: Side(python, side, kind, folder, given.tokens)  # noqa: B023, E731
            sides = make(sys.executable, "door" if given.door else "ours"), make(given.peer, "peer")
            for case in given.cases:
                print(compare(*sides, case, given.turns, given.tokens), flush=True)
            for side in sides:
                side.close()
            print(f"\n{forecast_row(kind, folder)}")


if __name__ == "__main__":
    main()
