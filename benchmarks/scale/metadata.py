"""(c) `prepare`, and the metadata of a checkpoint, in worlds of n ranks of which one exists. Times are of the processor.

The ranks are those of torch's fake process group, as in a rehearsal. What the other ranks would say of their shards is this
rank's own answer, moved to their rows. The peer is what `torch.distributed.checkpoint` does with the same plans: rank 0
alone makes the global plan, and every rank makes its local one.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor, Shard

from paceline import Accelerator
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.format.shards import read_index
from paceline.checkpoint.state.train_state import TrainState
from paceline.checkpoint.store import store_for
from paceline_lens.forecast.rehearsal import SimulatedWorld, in_child
from paceline_lens.torch_internals import imaginary
from scale import growth

SIZES = (8, 512, 4096, 16384)
PARAMETERS = 12  # of the model whose checkpoint is planned
ROWS_OF_A_RANK = 4
RANKS_PER_HOST = 8


def plan_at(rank: int, plan: SavePlan) -> SavePlan:
    """The plan of another rank, which has the same rows further down."""
    items = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None
        rows = torch.Size([rank * ROWS_OF_A_RANK, *data.chunk.offsets[1:]])
        chunk = replace(data.chunk, offsets=rows)
        items.append(replace(item, index=replace(item.index, offset=rows), tensor_data=replace(data, chunk=chunk)))
    return replace(plan, items=items)


class SimulatedPeers:
    """The ranks of a world that does not exist, seen from one of them; counts the bytes that it is told."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.bytes: Counter[str] = Counter()
        self.own_s = 0.0  # spent on answers of ranks that do not exist, which is no cost of a save

    def _answers(self, obj: object) -> list[Any]:
        began = time.process_time()
        answers: list[Any] = [obj] * self.size
        if isinstance(obj, SavePlan):
            answers = [plan_at(rank, obj) for rank in range(self.size)]
        self.own_s += time.process_time() - began
        return answers

    def any(self, flag: bool) -> bool:
        """The flag."""
        self.bytes["every rank"] += 8
        return flag

    def gather_object(self, obj: object) -> list[Any]:
        """What all ranks would answer."""
        self.bytes["every rank"] += len(pickle.dumps(obj)) * self.size
        return self._answers(obj)

    def collect_object(self, obj: object) -> list[Any]:
        """The same, on rank 0 alone."""
        self.bytes["rank 0"] += len(pickle.dumps(obj)) * self.size
        return self._answers(obj)

    def scatter_object(self, objs: list[Any] | None) -> Any:
        """This rank's own."""
        assert objs is not None
        self.bytes["every rank"] += len(pickle.dumps(objs[0]))
        return objs[0]

    def apart(self) -> SimulatedPeers:
        """The same."""
        return self


class CountedStore:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        if name not in ("open", "files", "exists", "folder", "stage", "publish", "remove", "recover", "list"):
            return attribute

        def counted(*arguments: Any, **named: Any) -> Any:
            self.requests += 1
            return attribute(*arguments, **named)

        return counted


def saved(size: int) -> dict[str, float]:
    """A save by rank 0 of `size`, and torch's planning of the same."""
    imaginary.join_imaginary_group(size)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (size,))
    model = nn.ParameterList()
    for _ in range(PARAMETERS):
        part = torch.zeros(ROWS_OF_A_RANK, 8)
        model.append(nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False)))
    state = TrainState(models={"model": model})
    peers = SimulatedPeers(size)
    with tempfile.TemporaryDirectory() as folder:
        store = CountedStore(store_for(folder))
        checkpointer = Checkpointer(peers)  # type: ignore[arg-type]
        with patch("paceline.checkpoint.checkpointer.store_for", lambda path: store):
            began = time.process_time()
            path = checkpointer.save(f"{folder}/checkpoint", state)
            first_s = time.process_time() - began - peers.own_s
            requests = store.requests
            began = time.process_time()
            checkpointer.save(f"{folder}/again", state)
            again_s = time.process_time() - began
        began = time.process_time()
        Manifest.read(store, path)  # type: ignore[arg-type]
        read_index(store, path)  # type: ignore[arg-type]
        read_s = time.process_time() - began
        sizes = {name: os.path.getsize(f"{path}/{name}") for name in ("manifest.json", ".metadata", "state.json")}
    tensors = {f"models/model/{name}": parameter for name, parameter in model.named_parameters()}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), StorageMeta(), is_coordinator=True)
    began = time.process_time()
    local = planner.create_local_plan()
    plans = [plan_at(rank, local) for rank in range(size)]
    planner.create_global_plan(plans)
    torch_s = time.process_time() - began
    return {
        "save, rank 0": first_s,
        "save again, rank 0": again_s,
        "reading manifest and index, each rank": read_s,
        "torch's planning, rank 0": torch_s,
        "told to rank 0, bytes": peers.bytes["rank 0"],
        "told to every rank, bytes": peers.bytes["every rank"],
        "manifest, bytes": sizes["manifest.json"],
        "index, bytes": sizes[".metadata"],
        "state, bytes": sizes["state.json"],
        "requests of rank 0": requests,
    }


def layouts(size: int) -> dict[str, dict[str, int]]:
    """The plans that are prepared, by their names."""
    plans = {"replicate": {"replicate": size}, "shard": {"shard": size}}
    if size > RANKS_PER_HOST:
        plans["shard on a host, replicate over hosts"] = {"shard": RANKS_PER_HOST, "replicate": size // RANKS_PER_HOST}
    return plans


def prepared(size: int, plan: dict[str, int]) -> float:
    """Seconds of processor time of `Accelerator()` and `prepare` on one rank of a world of `size`."""
    taken: list[float] = []

    def work() -> None:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
        optimizer = torch.optim.AdamW(model.parameters())
        began = time.process_time()
        accelerator = Accelerator(plan=plan)
        accelerator.prepare(model, optimizer)
        taken.append(time.process_time() - began)
        raise SystemExit

    def timed() -> float:
        rehearsed = SimulatedWorld(size, min(size, RANKS_PER_HOST))
        from paceline.world.runtime import Runtime
        from paceline_lens.forecast.rehearsal import _perform  # the child is here already

        _perform(work, rehearsed, Runtime())
        return taken[0]

    return result(timed)


def result(work: Any) -> Any:
    """What `work` gives in a process of its own."""
    kind, value = in_child(work)
    if kind != "result":
        raise RuntimeError(str(value))
    return value


def table(sizes: tuple[int, ...] = SIZES) -> str:
    """Times, bytes and requests by ranks, as Markdown."""
    rows: dict[str, dict[int, float]] = {}
    for size in sizes:
        for name, plan in layouts(size).items():
            row = rows.setdefault(f"`Accelerator()` and `prepare`, {name}, one rank", {})
            row[size] = prepared(size, plan)
        for name, value in result(lambda size=size: saved(size)).items():
            rows.setdefault(name, {})[size] = value
    heads = " | ".join(map(str, sizes))
    lines = [f"| what | {heads} | exponent |", "|---|" + "---|" * (len(sizes) + 1)]
    for name, by_size in rows.items():
        is_time = "bytes" not in name and "requests" not in name
        cells = ["" for size in sizes if size not in by_size]
        cells += [growth.shown(value) if is_time else f"{value:,.0f}" for value in by_size.values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {growth.exponent(by_size):.2f} |")
    return "\n".join(lines)
