"""DeepSpeed's pipelines on real processes: every partition, stage and width gives the numbers of one plain process."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
from torch import nn

from paceline.base.errors import DataError, PlanError, TrainError
from paceline.compat.deepspeed.initialize import initialize
from paceline.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from paceline.compat.deepspeed.topology import PipeDataParallelTopology
from paceline.parallel.strategy import STRATEGIES
from paceline.testing import RankFailed, run_ranks

list(STRATEGIES)  # imported here, not by each rank of each test

STEPS, MICRO = 3, 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class Masked(nn.Module):
    """Takes and gives `(hidden, scale, mask)`: a float without a gradient and whole numbers travel along."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, given):
        hidden, scale, mask = given
        return hidden + self.linear(hidden) * scale * mask.unsqueeze(-1), scale, mask


def plain() -> list[Any]:
    return [
        LayerSpec(nn.Linear, 6, 9),
        torch.tanh,
        LayerSpec(nn.Linear, 9, 7),
        LayerSpec(nn.LayerNorm, 7),
        nn.Tanh(),
        LayerSpec(nn.Linear, 7, 7),
        nn.Linear(7, 5),
    ]


def head(embedding: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(hidden, embedding.weight)


def tied() -> list[Any]:
    return [
        TiedLayerSpec("embed", nn.Embedding, 24, 8),
        *(LayerSpec(Block, 8) for _ in range(3)),
        TiedLayerSpec("embed", nn.Embedding, 24, 8, forward_fn=head),
    ]


def tuples() -> list[Any]:
    return [*(LayerSpec(Masked, 6) for _ in range(4)), lambda given: given[0], LayerSpec(nn.Linear, 6, 5)]


LAYERS = {"plain": plain, "tied": tied, "tuples": tuples}


def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten())


def micro_batch(kind: str, number: int, rows: int = MICRO) -> Any:
    generator = torch.Generator().manual_seed(100 + number)
    if kind == "tied":
        tokens = torch.randint(0, 24, (rows, 7), generator=generator)
        return tokens[:, :-1].clone(), tokens[:, 1:].clone()
    x = torch.randn(rows, 6, generator=generator)
    labels = torch.randint(0, 5, (rows,), generator=generator)
    return ((x, torch.full((rows, 1), 0.5), torch.arange(rows) % 2) if kind == "tuples" else x), labels


def shown(kind: str, replica: int, width: int, rows: Any = None) -> Any:
    """What one replica reads, micro-batch by micro-batch."""
    number = replica
    while True:
        yield micro_batch(kind, number, rows[number % len(rows)] if rows else MICRO)
        number += width


def alone(kind: str, width: int, gas: int, clip: float = 0.0, rows: Any = None, steps: int = STEPS) -> Any:
    """The same without any library: a sequential model, plain SGD."""
    torch.manual_seed(7)
    layers: list[Any] = []
    first: Any = None
    for spec in LAYERS[kind]():
        if isinstance(spec, TiedLayerSpec) and first is not None:
            layers.append(lambda x, first=first: head(first, x))
            continue
        layers.append(spec.build() if isinstance(spec, LayerSpec) else spec)
        first = layers[-1] if isinstance(spec, TiedLayerSpec) else first
    modules = nn.ModuleDict({str(n): layer for n, layer in enumerate(layers) if isinstance(layer, nn.Module)})

    def forward(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x

    optimizer = torch.optim.AdamW(modules.parameters(), lr=0.01, weight_decay=0.0)
    readers = [shown(kind, replica, width, rows) for replica in range(width)]
    losses = []
    for step in range(steps + 1):
        total = 0.0
        for reader in readers:
            for _ in range(gas):
                inputs, labels = next(reader)
                loss = loss_of(forward(inputs), labels) / (gas * width)
                loss.backward()
                total += loss.item()
        losses.append(total)
        if step < steps:
            if clip:
                nn.utils.clip_grad_norm_(modules.parameters(), clip)
            optimizer.step()
        optimizer.zero_grad()
    return losses[:-1], losses[-1], modules.state_dict()


def config(gas: int, zero: int = 0, clip: float = 0.0, **more: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": gas,
        "optimizer": optimizer,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": zero},
        **more,
    }


def made(kind: str, stages: int, gas: int, settings: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(7)
    model = PipelineModule(LAYERS[kind](), num_stages=stages, loss_fn=loss_of, **options)
    return initialize(model=model, model_parameters=model.parameters(), config=settings)[0]


def trained(kind: str, stages: int, gas: int, settings: Any = None, rows: Any = None, **options: Any) -> Any:
    engine = made(kind, stages, gas, settings or config(gas), **options)
    width = engine.grid.data_parallel_size
    data = shown(kind, engine.grid.data_parallel_id, width, rows)
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    last = engine.eval_batch(data).item()
    state = engine.accelerator.get_state_dict(engine._wrapped[0])
    own = sum(p.numel() for p in engine.module.parameters())
    return losses, last, {name: value.clone() for name, value in state.items()}, own, engine.global_steps


def compare(outcome: Any, expected: Any, tolerance: float = 1e-6) -> None:
    losses, last, state = expected
    for result in outcome:
        assert result[0] == pytest.approx(losses, abs=tolerance)
        assert result[1] == pytest.approx(last, abs=tolerance)
    for name, value in state.items():
        torch.testing.assert_close(outcome[0][2][name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "world", "stages", "gas", "zero", "options"),
    [
        ("plain", 2, 2, 4, 0, {"partition_method": "uniform"}),
        ("plain", 3, 3, 3, 0, {"partition_method": "parameters"}),
        ("plain", 2, 2, 1, 1, {"partition_method": "type:linear"}),
        ("plain", 4, 2, 2, 1, {"partition_method": [3]}),
        ("plain", 4, 2, 3, 2, {}),
        ("plain", 4, 2, 2, 3, {"activation_checkpoint_interval": 2}),
        ("plain", 1, 2, 2, 0, {}),
        ("plain", 2, 1, 4, 0, {}),
        ("tied", 2, 2, 2, 0, {"activation_checkpoint_interval": 1}),
        ("tied", 4, 2, 3, 1, {}),
        ("tied", 4, 2, 2, 3, {"partition_method": "uniform"}),
        ("tied", 3, 3, 2, 0, {}),
        ("tuples", 2, 2, 2, 0, {"partition_method": "uniform"}),
        ("tuples", 3, 3, 4, 0, {"activation_checkpoint_interval": 2, "partition_method": "uniform"}),
        ("plain", 2, 2, 2, 0, {"partition_method": "profile", "example_inputs": torch.zeros(2, 6)}),
    ],
)
def test_the_numbers_of_one_process(kind, world, stages, gas, zero, options) -> None:
    outcome = run_ranks(lambda: trained(kind, stages, gas, config(gas, zero), **options), world=world)
    compare(outcome, alone(kind, max(1, world // stages), gas))
    assert [result[4] for result in outcome] == [STEPS] * world


def test_clipping_over_all_stages() -> None:
    settings = config(2, zero=1, clip=0.2)
    compare(run_ranks(trained, world=4, args=("tied", 2, 2, settings)), alone("tied", 2, 2, clip=0.2))


@pytest.mark.parametrize("zero", [0, 3])
def test_micro_batches_of_different_sizes(zero: int) -> None:
    """Each counts the same, however many rows it has; replicas may read other shapes than each other."""
    rows = [2, 1, 2, 3, 1]
    outcome = run_ranks(trained, world=4, args=("plain", 2, 3, config(3, zero), rows))
    compare(outcome, alone("plain", 2, 3, rows=rows))
