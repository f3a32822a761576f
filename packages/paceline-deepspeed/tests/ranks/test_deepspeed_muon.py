"""DeepSpeed's Muon: which parameters it steps, and the same numbers at every stage and width."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.testing import run_ranks
from paceline_deepspeed.initialize import initialize


class Model(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        self.mid = nn.Linear(16, 16, bias=bias)
        self.lm_head = nn.Linear(16, 20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.tanh(self.mid(self.embed(x))))


def losses(stage: int, clip: float, bias: bool, **params: object) -> list[float]:
    """The mean losses over all ranks of three steps on the same 4 rows."""
    options = {"lr": 1e-2, "momentum": 0.9, "muon_lr": 2e-2, "adam_lr": 1e-3, **params}
    config = {
        "train_batch_size": 4,
        "gradient_clipping": clip,
        "optimizer": {"type": "Muon", "params": options},
        "zero_optimization": {"stage": stage},
    }
    engine, optimizer, _, _ = initialize(model=Model(bias), config=config)
    assert [(group["use_muon"], group["lr"]) for group in optimizer.param_groups] == [(True, 2e-2), (False, 1e-3)]
    assert all(group["weight_decay"] == 0 for group in optimizer.param_groups)
    x, y = torch.arange(8).view(4, 2), torch.arange(8, 16).view(4, 2)
    size = engine.train_micro_batch_size_per_gpu()
    rows = slice(engine.get_data_parallel_rank() * size, (engine.get_data_parallel_rank() + 1) * size)
    values: list[float] = []
    for _ in range(3):
        loss = cross_entropy(engine(x[rows]).flatten(0, 1), y[rows].flatten())
        engine.backward(loss)
        engine.step()
        values.append(engine.accelerator.reduce(loss.detach(), "mean").item())
    return values


def test_the_numbers_of_deepspeed_0_19_8() -> None:
    # Recorded under the real one: stage 1, float32, its default clipping.
    assert run_ranks(losses, 1, args=(1, 1.0, False))[0][-1] == pytest.approx(2.844459, abs=2e-6)


def test_all_stages_and_widths_take_the_same_steps() -> None:
    def work() -> dict[str, list[float]]:
        return {
            f"{stage} {clip} {method}": losses(stage, clip, True, ns_method=method)
            for stage in (0, 1, 2, 3)
            for clip in (0.0, 1.0)
            for method in ("gram", "standard")
        }

    alone, together = run_ranks(work, 1)[0], run_ranks(work, 2)[0]
    for case, values in together.items():
        # The iterations of "standard" are in bfloat16.
        assert values == pytest.approx(alone[case], abs=1e-5 if "gram" in case else 1e-3), case
    for stage in "123":
        assert alone[f"{stage} 0.0 gram"] == pytest.approx(alone["0 0.0 gram"], abs=1e-6)
