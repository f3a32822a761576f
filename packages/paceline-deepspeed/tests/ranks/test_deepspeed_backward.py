"""Backward passes that a DeepSpeed script starts itself, and losses that were computed without the engine."""

from __future__ import annotations

import torch
from torch import nn

from paceline import TrainError
from paceline.testing import run_ranks
from paceline_deepspeed.initialize import initialize

STAGES = (0, 1, 2, 3)


class LossAndOutput(nn.Module):
    """Returns a loss beside the values from which it was computed, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(x)
        return hidden.mean(), hidden


def by_loss(engine, x: torch.Tensor) -> None:
    engine(x)[0].backward()


def by_output(engine, x: torch.Tensor) -> None:
    engine(x)[1].mean().backward()


def by_two_passes(engine, x: torch.Tensor) -> None:
    loss, hidden = engine(x)
    (hidden.mean() / 2).backward(retain_graph=True)
    (loss / 2).backward()


def by_both_at_once(engine, x: torch.Tensor) -> None:
    loss, hidden = engine(x)
    (loss / 4 + hidden.mean() * 3 / 4).backward()


def by_scale(engine, x: torch.Tensor) -> None:
    engine.scale(engine(x)[0]).backward()


def by_scale_and_plain(engine, x: torch.Tensor) -> None:
    loss, hidden = engine(x)
    engine.scale(loss / 2).backward(retain_graph=True)
    (hidden.mean() / 2).backward()


def by_engine(engine, x: torch.Tensor) -> None:
    engine.backward(engine(x)[0])


def by_module(engine, x: torch.Tensor) -> None:
    engine.backward(engine.module(x)[0])


WAYS = (by_loss, by_output, by_two_passes, by_both_at_once, by_scale, by_scale_and_plain, by_engine, by_module)


def start(model: nn.Module, stage: int, **keys):
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0, **keys}
    config["zero_optimization"] = {"stage": stage}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return initialize(model=model, optimizer=optimizer, config=config)[0]


def trained() -> dict[str, list[float]]:
    """The weights after two windows of two micro-batches, by the way in which the backward pass was started."""
    weights: dict[str, list[float]] = {}
    for stage in STAGES:
        for way in WAYS:
            engine = start(LossAndOutput(), stage)
            for number in range(4):
                way(engine, torch.full((2, 2), 1.0 + number + engine.get_data_parallel_rank()))
                engine.step()
            weights[f"{way.__name__} {stage}"] = engine.module_state_dict()["layer.weight"].flatten().tolist()
    return weights


def test_each_way_to_start_a_backward_pass_gives_the_mean_over_the_window() -> None:
    # Each gradient is the input: rank 0 has 1, 2, 3, 4, and rank 1 has one more each.
    assert {tuple(weight) for weight in run_ranks(trained, 1)[0].values()} == {(-4.0, -4.0)}
    assert {tuple(weight) for weight in run_ranks(trained, 2)[1].values()} == {(-5.0, -5.0)}


def test_a_gradient_that_passes_two_engines_is_divided_once() -> None:
    def work() -> list[float]:
        generator = start(nn.Linear(1, 1, bias=False), 1)
        judge = start(nn.Linear(1, 1, bias=False), 1)
        with torch.no_grad():
            generator.module.weight.fill_(2.0)
            judge.module.weight.fill_(3.0)
        for number in range(2):
            made = generator(torch.full((2, 1), 1.0 + number))
            (judge(made).mean() + made.mean()).backward()
            generator.step()
            judge.step()
        return [engine.module.weight.item() for engine in (generator, judge)]

    # The generator's gradient is x * (3 + 1), the judge's is x * 2; x is 1.5 in the mean.
    assert run_ranks(work, 1)[0] == [2.0 - 6.0, 3.0 - 3.0]


def test_gradients_that_the_engine_could_not_scale_are_refused() -> None:
    def code(work) -> str:
        try:
            work()
        except TrainError as error:
            return error.code
        return ""

    def unseen() -> None:
        engine = start(LossAndOutput(), 0, gradient_accumulation_steps=1)
        engine.module(torch.ones(2, 2))[0].backward()
        engine.step()

    def without_loss_scale() -> None:
        engine = start(LossAndOutput(), 1, fp16={"enabled": True})
        engine(torch.ones(2, 2))[0].backward()

    codes = run_ranks(lambda: [code(unseen), code(without_loss_scale)], 1)[0]
    assert codes == ["deepspeed-backward", "deepspeed-loss-scale"]
