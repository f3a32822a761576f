"""DeepSpeed's pipelines on real processes: every partition, stage and width gives the numbers of one plain process."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
from shared_ranks import run_ranks
from torch import nn

from paceline import testing
from paceline.base.errors import ConfigError, DataError, PlanError, TrainError
from paceline.parallel.strategy import STRATEGIES
from paceline.world.sharded import local, whole
from paceline_deepspeed.initialize import initialize
from paceline_deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from paceline_deepspeed.topology import PipeDataParallelTopology

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
    state = engine.accelerator.get_state_dict(engine.prepared_model)
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
    outcome = run_ranks(partial(trained, kind, stages, gas, config(gas, zero), **options), world, timeout_s=80)
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


# -- weights: each rank its own, the same at every width ---------------------------------------------------------


def built(stages: int, world_seeds: bool = False, **options: Any) -> Any:
    torch.manual_seed(7 + (int(os.environ["RANK"]) if world_seeds else 0))
    model = PipelineModule(tied(), num_stages=stages, loss_fn=loss_of, **options)
    drawn = torch.rand(3).tolist()  # what a script draws next
    real = sum(p.numel() for p in model.parameters() if not p.is_meta)
    return model.stage_id, real, {n: p.tolist() for n, p in model.state_dict().items() if not p.is_meta}, drawn


@pytest.mark.parametrize("seeds", [False, True])
def test_each_rank_builds_its_stage(seeds: bool) -> None:
    ((_, whole, expected, drawn),) = run_ranks(lambda: built(1, seed_layers=seeds), world=1)
    ranks = run_ranks(lambda: built(2, seed_layers=seeds, partition_method="uniform"), world=4)
    assert [stage for stage, *_ in ranks] == [0, 0, 1, 1]
    for _, real, values, then in ranks:
        assert real < 0.8 * whole
        assert values == {name: expected[name] for name in values}
        assert then == drawn


def levelled() -> Any:
    """Ranks that draw differently: what several of them hold is the first one's."""
    torch.manual_seed(int(os.environ["RANK"]))
    model = PipelineModule(tied(), num_stages=2, loss_fn=loss_of)
    engine = initialize(model=model, config=config(2))[0]
    return engine.stage_id, {name: whole(p.detach()).tolist() for name, p in engine.module.named_parameters()}


def test_shared_weights_begin_equal() -> None:
    ranks = run_ranks(levelled, world=4)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert ranks[0][1]["0.weight"] == ranks[2][1]["4.layer.weight"]


# -- data ------------------------------------------------------------------------------------------------------


def sparing(kind: str) -> Any:
    """Ranks whose iterators end at different places, raise, or are not there."""
    engine = made(kind, 3 if kind == "tuples" else 2, 2, config(2))
    rank, data = engine.global_rank, shown(kind, engine.grid.data_parallel_id, engine.grid.data_parallel_size)
    between = 0 < engine.stage_id < engine.num_stages - 1
    told = [engine.train_batch(None if between else data).item()]
    short = iter([next(data), next(data), next(data)] if rank == 0 else [next(data) for _ in range(4)])
    engine.set_dataiterator(None if between else short)
    told.append(engine.train_batch().item())
    with pytest.raises(StopIteration):
        engine.train_batch()

    def broken() -> Any:
        yield next(data)
        raise OSError("disk")

    engine.set_dataiterator(None if between else broken() if rank == 0 else data)
    with pytest.raises(OSError if rank == 0 else TrainError, match="disk" if rank == 0 else "pipe-iterator"):
        engine.train_batch()
    engine.set_dataiterator(None)
    with pytest.raises(DataError, match="pipe-data"):
        engine.eval_batch()
    told.append(engine.train_batch(None if between else shown(kind, engine.grid.data_parallel_id, 1)).item())
    return told, engine.global_steps, engine.micro_steps, engine.global_samples


@pytest.mark.parametrize(("kind", "world"), [("plain", 4), ("tuples", 3)])
def test_iterators_that_end_fail_or_lack(kind: str, world: int) -> None:
    ranks = run_ranks(sparing, world=world, args=(kind,))
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0][1:] == (3, 6, 6 * MICRO * (2 if kind == "plain" else 1))


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> Any:
        return torch.full((6,), number / 10), number % 5


def from_a_dataset() -> Any:
    torch.manual_seed(7)
    model = PipelineModule(plain(), num_stages=2, loss_fn=loss_of)
    engine, _, loader, _ = initialize(model=model, config=config(2, steps_per_print=2), training_data=Rows())
    losses = [engine.train_batch().item() for _ in range(4)]
    with pytest.raises(TrainError, match="Only train_batch"):
        engine(torch.zeros(1, 6))
    with pytest.raises(TrainError, match="pipe-train-batch"):
        engine.backward(torch.zeros(()))
    with pytest.raises(TrainError, match="pipe-train-batch"):
        engine.step()
    with torch.no_grad(), pytest.raises(TrainError, match=r"requires gradients enabled.*pipe-gradients"):
        engine.train_batch()
    with pytest.raises(DataError, match="pipe-batch"):
        engine.train_batch(iter([torch.zeros(2, 6)] * 2))
    return losses, len(loader), (engine.is_first_stage(), engine.is_last_stage(), engine.num_stages, engine.stage_id)


def test_a_dataset_is_read_in_order_and_again() -> None:
    printed: list[str] = []
    ranks = testing.run_ranks(from_a_dataset, world=2, output=printed)
    assert ranks[0][:2] == ranks[1][:2]
    assert [rank[2] for rank in ranks] == [(True, False, 2, 0), (False, True, 2, 1)]
    lines = [line for line in "".join(printed).splitlines() if line.startswith("steps: ")]
    assert [line.split(" iter")[0] for line in lines] == [f"steps: {n} loss: {ranks[0][0][n - 1]:0.4f}" for n in (2, 4)]
    torch.manual_seed(7)
    model = nn.Sequential(*(each.build() if isinstance(each, LayerSpec) else each if isinstance(each, nn.Module)
                            else nn.Tanh() for each in plain()))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    order, data = [*range(10)] * 2, Rows()
    for step, loss in enumerate(ranks[0][0]):
        rows = [data[number] for number in order[4 * step : 4 * step + 4]]
        expected = loss_of(model(torch.stack([x for x, _ in rows])), torch.tensor([y for _, y in rows]))
        assert loss == pytest.approx(expected.item(), abs=1e-6)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()


# -- evaluation ------------------------------------------------------------------------------------------------


def evaluated() -> Any:
    engine = made("plain", 2, 3, config(3))
    replica, width = engine.grid.data_parallel_id, engine.grid.data_parallel_size
    engine.set_dataiterator(shown("plain", replica, width))
    first = engine.train_batch().item()

    def again() -> Any:
        return shown("plain", replica, width)

    mean, logits = engine.eval_batch(again(), return_logits=True)
    each = engine.eval_batch(again(), reduce_output=None, num_micro_batches=2)
    held = engine.eval_batch(again(), bcast_loss=False)
    outputs = engine.eval_batch(again(), compute_loss=False, num_micro_batches=1)
    assert engine.micro_batch_size == engine.train_micro_batch_size_per_gpu()
    assert engine.micro_batches == engine.gradient_accumulation_steps()
    with pytest.raises(ValueError, match="reduce_output"):
        engine.eval_batch(again(), reduce_output="sum")
    return {
        "losses": [first, engine.train_batch().item()],
        "mean": mean.item(),
        "logits": list(logits.shape),
        "each": [loss.item() for loss in each],
        "held": None if held is None else held.item(),
        "outputs": list(outputs.shape),
        "grad": mean.requires_grad or logits.requires_grad,
        "training": engine.training,
    }


def test_evaluation_leaves_training_where_it_is() -> None:
    ranks = run_ranks(evaluated, world=4)
    losses = alone("plain", 2, 3)[0]
    for number, rank in enumerate(ranks):
        assert rank["losses"] == pytest.approx(losses[:2], abs=1e-6)
        assert rank["mean"] == pytest.approx(ranks[0]["mean"])
        assert (rank["logits"], rank["outputs"]) == ([3 * MICRO, 5], [MICRO, 5])
        assert rank["held"] == (None if number < 2 else pytest.approx(rank["mean"]))
        assert not rank["grad"]
        assert rank["training"]
    two = [sum(rank["each"]) / 2 for rank in ranks]
    assert two[0] == pytest.approx(two[2])
    assert two[0] != pytest.approx(two[1])


# -- precision, and what is kept -----------------------------------------------------------------------------------


def half(precision: str) -> Any:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1} if precision == "fp16" else {"enabled": False}
    settings = config(2, zero=1, fp16=fp16, bf16={"enabled": precision == "bf16"})
    engine = made("tied", 2, 2, settings)
    data = shown("tied", engine.grid.data_parallel_id, engine.grid.data_parallel_size)
    losses = [engine.train_batch(data).item()]
    before = [local(p).detach().clone() for p in engine.module.parameters()]
    inner = engine.accelerator.forward_backward

    def overflowing(*args: Any) -> Any:
        loss = inner(*args)
        if engine.is_first_stage():  # the other stage sees nothing of it
            engine.module.get_parameter("1.first.bias").grad.fill_(float("inf"))
        return loss

    engine.accelerator.forward_backward = overflowing
    engine.train_batch(data)
    same = all(torch.equal(old, local(p)) for old, p in zip(before, engine.module.parameters(), strict=True))
    return losses, same, engine.skipped_steps, engine.global_steps, engine.loss_scale()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_an_overflow_in_one_stage_is_one_in_all(precision: str) -> None:
    ranks = run_ranks(half, world=4, args=(precision,))
    assert all(rank == ranks[0] for rank in ranks)
    losses, same, skipped, steps, scale = ranks[0]
    assert losses == pytest.approx(alone("tied", 2, 2)[0][:1], abs=0.02)
    assert (same, skipped, steps) == (True, 1, 2)
    assert scale == (128 if precision == "fp16" else 1)


def saved(folder: str, stages: int, load: str) -> Any:
    engine = made("tied", stages, 2, config(2, zero=1))
    data = shown("tied", engine.grid.data_parallel_id, engine.grid.data_parallel_size)
    if load == "engine":
        path, client = engine.load_checkpoint(folder)
        assert path is not None
        assert client["step"] == 2
    elif load == "native":
        engine.accelerator.load_state(f"{folder}/native")
    if load:
        for _ in range(4):
            next(data)
    else:
        for _ in range(2):
            engine.train_batch(data)
        engine.accelerator.save_state(f"{folder}/native")
        engine.save_checkpoint(folder, client_state={"step": 2})
    return [engine.train_batch(data).item() for _ in range(2)], engine.global_steps


@pytest.mark.parametrize(("world", "stages", "load"), [(3, 3, "engine"), (1, 1, "native"), (4, 2, "engine")])
def test_a_checkpoint_resumes_at_another_number_of_stages(tmp_path, world: int, stages: int, load: str) -> None:
    first = run_ranks(saved, world=2, args=(str(tmp_path), 2, ""))
    later = run_ranks(saved, world=world, args=(str(tmp_path), stages, load))
    assert first[0][1] == 4
    for rank in later:
        assert rank[1] == (4 if load == "engine" else 2)
        if world < 4:  # two replicas read other samples
            assert rank[0] == pytest.approx(first[0][0], abs=1e-6)


@pytest.mark.parametrize("zero", [0, 1])
def test_an_optimizer_and_a_scheduler_that_come_after_the_engine(zero: int) -> None:
    """As diffusion-pipe gives them."""

    def work() -> Any:
        torch.manual_seed(7)
        model = PipelineModule(plain(), num_stages=2, loss_fn=loss_of)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        settings = config(2, zero)
        del settings["optimizer"]
        engine = initialize(model=model, config=settings)[0]
        assert engine.optimizer is None and engine.lr_scheduler is None
        assert engine.is_pipe_parallel and engine.is_data_parallel and not engine.is_model_parallel
        engine._configure_optimizer(lambda given: torch.optim.AdamW(given, lr=0.01, weight_decay=0.0), parameters)
        with pytest.raises(ConfigError, match="has one already, AdamW"):
            engine._configure_optimizer(None, parameters)
        engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer, factor=1.0)
        data = shown("plain", engine.grid.data_parallel_id, engine.grid.data_parallel_size)
        losses = [engine.train_batch(data).item() for _ in range(STEPS)]
        last = engine.eval_batch(data).item()
        assert engine.lr_scheduler.last_epoch == STEPS
        return losses, last, engine.accelerator.get_state_dict(engine.prepared_model)

    compare(run_ranks(work, 4), alone("plain", 2, 2))


# -- monitors, and warnings ----------------------------------------------------------------------------------------


def watched(folder: str) -> Any:
    monitor = {"enabled": True, "output_path": folder, "job_name": "run"}
    engine = made("plain", 2, 2, config(2, csv_monitor=monitor))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline.compat").addHandler(handler)
    losses = [engine.train_batch(shown("plain", 0, 1, rows=[4])).item() for _ in range(2)]
    engine.destroy()
    return losses, told


def test_monitors_get_the_loss_and_large_micro_batches_are_told(tmp_path) -> None:
    (losses, told), (_, nothing) = run_ranks(watched, world=2, args=(str(tmp_path),))
    assert nothing == []
    text = "".join(told)
    assert text.count("train_batch pulls 2 micro-batches, which came with 4 rows each, but a micro-batch is 2") == 1
    assert "a step sees 8 samples, and train_batch_size is 4" in text
    (file,) = tmp_path.rglob("*train_loss*.csv")
    rows = [line.split(",") for line in file.read_text().splitlines()[1:]]
    assert [float(value) for _, value in rows] == pytest.approx(losses)
    assert [int(float(samples)) for samples, _ in rows] == [4, 8]


# -- bad input -----------------------------------------------------------------------------------------------------


def refused() -> list[str]:
    found = []
    for build in (
        lambda: PipelineModule(plain(), num_stages=3),
        lambda: PipelineModule(plain(), topology=PipeDataParallelTopology(2, 2)),
        lambda: PipelineModule([nn.Linear(2, 2)], num_stages=2),
        lambda: PipelineModule(plain(), num_stages=2, loss_fn=loss_of)(torch.zeros(2, 6)),
        lambda: initialize(model=PipelineModule(plain(), num_stages=2, partition_method="profile"), config=config(1)),
    ):
        with pytest.raises((PlanError, DataError)) as caught:
            build()
        found.append(caught.value.code)
    return found


def test_what_cannot_be_laid_out() -> None:
    codes = ["pipe-stages", "pipe-topology", "pipe-empty", "pipe-unprepared", "pipe-profile"]
    assert run_ranks(refused, world=2) == [codes, codes]


def saved_on_rank_0(folder: str) -> None:
    engine, data = made("plain", 2, 2, config(2)), shown("plain", 0, 1)
    engine.train_batch(data)
    if engine.global_rank == 0:
        engine.save_checkpoint(folder)
    else:
        engine.train_batch(data)


def test_a_save_on_one_rank_while_others_train_does_not_hang(tmp_path) -> None:
    with pytest.raises(testing.RankFailed, match="checkpoint-ranks-missing"):
        testing.run_ranks(saved_on_rank_0, world=2, args=(str(tmp_path),))
