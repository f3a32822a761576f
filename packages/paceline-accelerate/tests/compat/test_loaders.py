"""Loaders through the door give what the real accelerate's give: samples, their order, and every draw from torch's stream."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from paceline.testing import run_ranks

REFERENCE = Path(__file__).parent / "reference"
RECORDED = json.loads(lzma.decompress((REFERENCE / "recorded_loaders.json.xz").read_bytes()))


def served():
    """Every case, where accelerate's names are served."""
    import sys

    from paceline.compat import install

    install(["accelerate"])
    sys.path.insert(0, str(REFERENCE))
    import loaders_program

    return json.loads(json.dumps(loaders_program.everything()))


def differences(name: str, size: int, ours, theirs) -> list[str]:
    """What of a case is not as recorded; a few things are meant to differ, and say why."""
    if "error" in theirs:
        # Batches in the place of a sampler: the real one takes them at several processes only.
        return [] if ours == theirs or name.startswith("batches as sampler") else [f"{ours} instead of {theirs}"]
    wrong = []
    compared = list(range(len(theirs["epochs"])))
    if "skip=" in name:
        # After a shortened epoch the real one repeats its number; ours goes on, as the run that was not resumed did.
        compared = [0, 1]
    if "skip=" in name and (name.startswith("drawing") or ("dispatch_batches=True" in name and "stream" not in name)):
        # The real one tells the sampler of a shortened loader no epoch; where rank 0 reads for all, it leaves out as many
        # batches of one process, not steps.
        compared = [0]
    is_dispatched = "dispatch_batches=True" in name or ("stream" in name and "dispatch_batches" not in name)
    if size == 3 and is_dispatched and ", 1 by" in name:
        # One row for three processes: the real one gives the last an empty batch, ours repeats the row.
        return []
    is_told = size == 1 and "skip" not in name and "dispatch" not in name
    for number in compared:
        epoch, expected = ours["epochs"][number], theirs["epochs"][number]
        fields = ["batches", "streams"]
        if name.startswith("groups") and not is_told:
            # The real one tells a batch sampler the epoch where it is the loader's own alone.
            fields = ["streams"]
        wrong += [
            f"epoch {number} {field}: {epoch[field]} instead of {expected[field]}"
            for field in fields
            if epoch[field] != expected[field]
        ]
        ends, recorded = epoch["ends"], expected["ends"]
        if name.startswith(("uneven", "groups", "batches as sampler")) or "skip=" in name:
            # The real one knows no remainder after a skip, and forgets that a batch sampler of the script's own drops it.
            ends, recorded = [step for step, _ in ends], [step for step, _ in recorded]
        if ends != recorded:
            wrong.append(f"epoch {number} ends: {ends} instead of {recorded}")
    for field, expected in theirs["attributes"].items():
        is_known = field != "total_batch_size" or ("stream" not in name and isinstance(expected, int))
        if is_known and ours["attributes"][field] != expected:
            wrong.append(f"{field}: {ours['attributes'][field]} instead of {expected}")
    if ours["prepared"] != theirs["prepared"]:
        wrong.append("prepare has drawn otherwise")
    if "skipped" in theirs and not ours["skipped"][1]:
        wrong.append("a shortened loader is no DataLoader")
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.timeout(240)
def test_as_recorded(size: int) -> None:
    ranks = run_ranks(served, world=size, group=size != 1, timeout_s=200)
    problems = []
    for name, recorded in RECORDED[str(size)].items():
        for rank, expected in enumerate(recorded):
            wrong = differences(name, size, ranks[rank][name], expected)
            problems += [f"{name}, rank {rank}: {text}" for text in wrong]
    assert not problems, f"{len(problems)} differ:\n" + "\n".join(problems[:60])


def served_uneven():
    """At four processes with `even_batches=False`: seven samples in batches of one; what each process sees and gathers."""
    import torch
    from torch.utils.data import DataLoader

    from paceline_accelerate.accelerator import Accelerator
    from paceline_accelerate.arguments import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rows = torch.tensor([[10.0], [10.0], [10.0], [10.0], [20.0], [20.0], [20.0]])
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, DataLoader(rows), DataLoader(rows))
    evaluated = [batch.item() for batch in held_out]
    gradients = []
    for batch in loader:
        accelerator.backward(model(batch).mean())
        gradients.append(accelerator.unwrap_model(model).weight.grad.item())
        optimizer.zero_grad()
    with accelerator.join_uneven_inputs([model], even_batches=True):
        evened = len(list(held_out))
    with accelerator.join_uneven_inputs([model], even_batches=False), torch.no_grad():
        trained_on = len(list(loader))
    model.eval()
    with accelerator.join_uneven_inputs([model], even_batches=False):
        uneven = len(list(held_out))
    return evaluated, gradients, len(held_out), evened, trained_on, uneven


def test_uneven_ends_count_no_filler() -> None:
    """An evaluation gives the last process nothing; a step of the training takes it along, and counts what is there."""
    ranks = run_ranks(served_uneven, world=4)
    evaluated, gradients, lengths, evened, trained_on, uneven = map(list, zip(*ranks, strict=True))
    assert evaluated == [[10.0, 20.0]] * 3 + [[10.0]]
    assert gradients == [[10.0, 20.0]] * 4
    assert evened == [2] * 4
    assert lengths == trained_on == uneven == [2, 2, 2, 1]
