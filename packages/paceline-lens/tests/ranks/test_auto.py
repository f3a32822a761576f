"""What a plan leaves to `auto` is chosen for the model and the memory, and gives the numbers of one process."""

import pytest
import torch
from parity_models import GPT, loss_of
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, PlanError
from paceline.testing import run_ranks
from paceline.world import runtime


class Small(runtime.Runtime):
    """A run on devices of so much memory."""

    def __init__(self, bytes_each: int) -> None:
        self.bytes_each = bytes_each

    def memory(self, device: torch.device, local_size: int) -> int:
        return self.bytes_each


def data() -> TensorDataset:
    tokens = torch.randint(0, 24, (8, 9), generator=torch.Generator().manual_seed(5))
    return TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())


def trained(plan, memory, loader_first=False):
    torch.manual_seed(3)
    runtime.use(Small(memory))
    accelerator = Accelerator(plan=plan, cpu=True, split_batches=True)
    model = GPT()
    loader = DataLoader(data(), 4)
    if loader_first:
        loader = accelerator.prepare(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        losses.append(float(accelerator.reduce(accelerator.forward_backward(model, batch, loss_of), "mean")))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.plan, losses


def test_the_cheapest_plan_that_fits_is_chosen_and_explained() -> None:
    ((_, want),) = run_ranks(trained, world=1, args=({}, 1 << 40))
    bytes_of = 4 * sum(p.numel() for p in GPT().parameters())
    found = {}
    for name, memory in {
        "much": 1 << 40,
        "less": int(4.2 * bytes_of / 0.7),
        "little": int(3.3 * bytes_of / 0.7),
    }.items():
        plan, losses = run_ranks(trained, world=2, args=({"shard": "auto"}, memory))[0]
        assert losses == pytest.approx(want, abs=3e-6)
        found[name] = (plan.layout.shard, plan.zero, plan.open)
        assert "fits: " in plan.explain()
    assert found["much"] == (1, 0, ())
    assert found["little"] == (2, 3, ())


@pytest.mark.needs("large")
def test_states_go_to_a_disk_where_no_plan_without_that_fits(tmp_path) -> None:
    ((_, want),) = run_ranks(trained, world=1, args=({}, 1 << 40))
    bytes_of = 4 * sum(p.numel() for p in GPT().parameters())
    asked = {"shard": "auto", "offload": f"auto=disk:{tmp_path}"}
    found = {}
    for name, factor in {"much": 100, "divided": 3.3, "little": 2.3}.items():
        plan, losses = run_ranks(trained, world=2, args=(asked, int(factor * bytes_of / 0.7)))[0]
        assert losses == pytest.approx(want, abs=3e-6)
        found[name] = plan
    assert [plan.offload for plan in found.values()] == ["no", "no", f"optimizer=disk:{tmp_path}"]
    assert "are on disk, and a step reads and writes" in found["little"].explain()
    assert not found["little"].open
    # Only the offload is open, and the ranks are as they would be without it.
    ((plan, losses),) = run_ranks(trained, world=1, args=({"offload": asked["offload"]}, int(2.3 * bytes_of / 0.7)))
    assert losses == want and plan.offload == f"optimizer=disk:{tmp_path}"


def too_little():
    runtime.use(Small(1000))
    accelerator = Accelerator(plan={"shard": "auto"}, cpu=True)
    with pytest.raises(PlanError) as caught:
        accelerator.prepare(GPT())
    return str(caught.value)


def loader_first():
    accelerator = Accelerator(plan={"tp": "auto"}, cpu=True)
    with pytest.raises(PlanError) as caught:
        accelerator.prepare_data_loader(DataLoader(data(), 4))
    return caught.value.code


def test_a_loader_may_come_before_the_model_where_only_its_division_is_open() -> None:
    """As `transformers.Trainer` prepares them."""
    ((_, want),) = run_ranks(trained, world=1, args=({}, 1 << 40))
    plan, losses = run_ranks(trained, world=2, args=({"shard": "auto", "zero": 2}, 1 << 40, True))[0]
    assert losses == pytest.approx(want, abs=3e-6) and (plan.layout.shard, plan.zero) == (2, 2)


def test_what_cannot_be_chosen_is_an_error_on_every_rank() -> None:
    for text in run_ranks(too_little, world=2):
        assert "[plan-none-fits]" in text and "needs" in text
    assert run_ranks(loader_first, world=2) == ["plan-open", "plan-open"]
