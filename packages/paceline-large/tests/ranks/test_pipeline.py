"""Pipelines on real processes: every schedule and split gives the numbers of one plain process."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
from parity_models import GPT, loss_of
from shared_ranks import run_ranks
from torch import nn

from paceline import Accelerator, CheckpointError
from paceline.base.errors import PlanError
from paceline.parallel.strategy import STRATEGIES
from paceline_large.pipeline.timing import measure

list(STRATEGIES)  # imported here, not by each rank of each test

STEPS, ROWS = 3, 8


class Wide(nn.Module):
    """A vision-like model: a parameter and a module on the root, blocks in two containers whose widths differ, masks
    that every stage computes, blocks that return tuples and take keywords, and a head that is called in halves."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(6, 8)
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.low = nn.ModuleList(Mixer(8) for _ in range(2))
        self.widen = nn.Linear(8, 12)
        self.high = nn.ModuleList(Mixer(12) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, x, keep=None):
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), self.patch(x)], dim=1) + self.position
        mask = torch.ones(x.shape[1] + 1) * self.offset
        for block in self.low:
            tokens, _ = block(tokens, mask=mask)
        tokens = torch.tanh(self.widen(tokens))
        for block in self.high:
            tokens, _ = block(hidden=tokens, mask=mask)
        return SimpleResult(self.head(self.norm(tokens[:, 0])))


class Mixer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden, mask):
        return hidden + self.second(torch.relu(self.first(hidden)) * mask[:, None]), None


class SimpleResult(dict):
    """As a Hugging Face model gives: items that are attributes too."""

    def __init__(self, logits=None, **rest):
        super().__init__(logits=logits, **rest)

    @property
    def logits(self):
        return self["logits"]


def sequence() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 9),
        nn.Tanh(),
        nn.Linear(9, 7),
        nn.LayerNorm(7),
        nn.Tanh(),
        nn.Linear(7, 7),
        nn.Tanh(),
        nn.Linear(7, 5),
    )


def batch(kind: str, step: int, rows: int = ROWS) -> Any:
    generator = torch.Generator().manual_seed(5 + step)
    if kind.startswith("gpt"):
        tokens = torch.randint(0, 24, (rows, 9), generator=generator)
        return tokens[:, :-1].clone(), tokens[:, 1:].clone()
    target = torch.randint(0, 5, (rows,), generator=generator)
    if kind == "wide":
        return {"x": torch.randn(rows, 4, 6, generator=generator), "target": target}
    return torch.randn(rows, 6, generator=generator), target


def made(kind: str) -> nn.Module:
    torch.manual_seed(7)
    if kind.startswith("gpt"):
        model = GPT(tied="tied" in kind, frozen="frozen" in kind, layers=8 if "deep" in kind else 4)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(
                parameter.requires_grad and ("front" not in kind or name.startswith(("blocks.3", "head")))
            )
        return model
    return Wide() if kind == "wide" else sequence()


def mean_of(output, target):
    if isinstance(target, dict):
        return nn.functional.cross_entropy(output.logits, target["target"])
    return loss_of(output, target)


def sum_of(output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


def call(model: nn.Module, data: Any) -> Any:
    return model(data["x"]) if isinstance(data, dict) else model(data[0])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": trained[:2], "weight_decay": 0.0}, {"params": trained[2:]}], lr=0.01, eps=1e-4)


@cache
def plain(kind: str, accumulate: int, clip: float, rows: tuple[int, ...]) -> dict[str, Any]:
    model = made(kind)
    optimizer = adam(model)
    losses, norms = [], []
    for start in range(0, len(rows), accumulate):
        for step in range(start, start + accumulate):
            data = batch(kind, step, rows[step])
            loss = mean_of(call(model, data), data if isinstance(data, dict) else data[1])
            (loss / accumulate).backward()
            losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        output = call(model, batch(kind, 0))
    output = output.logits if isinstance(output, dict) else output
    return {"losses": losses, "norms": norms, "output": output, "weights": model.state_dict()}


def ours(kind, accumulate, clip, rows, plan, options, items=False):
    model = made(kind)
    accelerator = Accelerator(None, accumulate, plan=plan, options={"pipeline": options}, cpu=True)
    width, index = accelerator.plan.layout.width, accelerator.plan.layout.data_index(accelerator.process_index)
    model, optimizer = accelerator.prepare(model, adam(model))
    losses, norms = [], []
    for step, count in enumerate(rows):
        data = batch(kind, step, count)
        own = slice(index * count // width, (index + 1) * count // width)
        data = {k: v[own] for k, v in data.items()} if isinstance(data, dict) else tuple(v[own] for v in data)
        with accelerator.accumulate(model):
            if items:
                loss = accelerator.forward_backward(model, data, sum_of, num_items=data[1].numel()) / data[1].numel()
            elif isinstance(data, dict):
                named = {"x": data["x"], "keep": data["target"]}
                loss = accelerator.forward_backward(
                    model, named, lambda output, given: mean_of(output, {"target": given["keep"]})
                )
            else:
                loss = accelerator.forward_backward(model, data, mean_of)
            norm = accelerator.clip_grad_norm_(model.parameters(), clip)
            if accelerator.sync_gradients:
                norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss, "mean")))
    model.eval()
    with torch.no_grad():
        output = call(model, batch(kind, 0))
    output = output.logits if isinstance(output, dict) else output
    return {
        "losses": losses, "norms": norms, "output": output, "weights": accelerator.get_state_dict(model),
        "own": [name for name, _ in accelerator.unwrap_model(model).named_parameters()],
    }  # fmt: skip


def compare(want, results, tolerance=2e-6):
    for got in results:
        assert got["losses"] == pytest.approx(want["losses"], abs=tolerance)
        assert got["norms"] == pytest.approx(want["norms"], abs=tolerance)
        assert list(got["weights"]) == list(want["weights"])
        for name, weight in want["weights"].items():
            torch.testing.assert_close(
                got["weights"][name], weight, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )
        torch.testing.assert_close(got["output"], want["output"], atol=1e-5, rtol=0)


def check(kind, plan, options=None, *, accumulate=1, clip=0.5, rows=(ROWS,) * STEPS, items=False, tolerance=2e-6):
    world = math.prod(plan.get(axis, 1) for axis in ("pp", "replicate", "shard", "tp"))
    results = run_ranks(ours, world, args=(kind, accumulate, clip, rows, plan, options or {}, items), timeout_s=80)
    compare(plain(kind, accumulate, clip, tuple(rows)), results, tolerance)
    return results


SCHEDULES = ["gpipe", "1f1b", "breadth-first", "interleaved", "zero-bubble", "zbv", "dualpipev"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_on_two(schedule):
    results = check("gpt tied", {"pp": 2}, {"schedule": schedule, "microbatches": 4})
    assert all(len(got["own"]) < len(results[0]["weights"]) for got in results)  # each holds a part


def test_zero_bubble_of_several_stages_a_rank():
    check("gpt deep", {"pp": 2}, {"schedule": "zero-bubble", "stages_per_rank": 2, "microbatches": 4})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_four_stages(schedule):
    check("gpt tied frozen", {"pp": 4}, {"schedule": schedule}, accumulate=2, rows=(ROWS,) * 4)


def two_calls_a_step(plan: dict[str, int]) -> dict[str, Any]:
    """The weights after two steps, each with the gradients of two calls that were not declared as a window."""
    model = made("gpt tied")
    accelerator = Accelerator(plan=plan, options={"pipeline": {"schedule": "zero-bubble"}} if plan else {}, cpu=True)
    layout = accelerator.plan.layout
    width, index = layout.width, layout.data_index(accelerator.process_index)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(4):
        own = slice(index * ROWS // width, (index + 1) * ROWS // width)
        accelerator.forward_backward(model, tuple(part[own] for part in batch("gpt", step)), mean_of)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def test_gradients_of_two_calls_add_up_where_backward_passes_are_split() -> None:
    (want,) = run_ranks(two_calls_a_step, world=1, args=({},))
    for got in run_ranks(two_calls_a_step, world=4, args=({"pp": 2, "shard": 2},)):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("axis", ["replicate", "shard"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_beside_data_parallel(axis, schedule):
    check("gpt tied", {"pp": 2, axis: 2}, {"schedule": schedule}, accumulate=2, rows=(ROWS,) * 4)


@pytest.mark.parametrize(
    "options", [{}, {"split": "parameters"}, {"schedule": "interleaved", "split": ["low.1", "high.0", "high.2"]}]
)
def test_a_model_of_many_shapes(options):
    check("wide", {"pp": 2}, {**options, "blocks": "low.*, high.*"}, accumulate=2, rows=(ROWS,) * 4)


def test_parameters_that_are_given_up_between_passes():
    """Halves of a backward pass find the parameters of the forward pass."""

    def run(schedule):
        options = {"pipeline": {"schedule": schedule}, "shard": {"reshard": "yes"}}
        model = made("gpt")
        accelerator = Accelerator(plan={"pp": 2, "shard": 2}, options=options, cpu=True)
        model, optimizer = accelerator.prepare(model, adam(model))
        norms = []
        for step in range(2):
            accelerator.forward_backward(model, batch("gpt", step), mean_of)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    want = plain("gpt", 1, 0.5, (ROWS,) * STEPS)["norms"][:2]
    for schedule in ("1f1b", "zero-bubble"):
        for got in run_ranks(run, world=4, args=(schedule,)):
            assert got == pytest.approx(want, abs=2e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_front_that_is_frozen(schedule):
    """Stages behind one that trains nothing get gradients all the same."""
    check("gpt front", {"pp": 2}, {"schedule": schedule})


def losses_with_other_fronts(schedule: str | None) -> list[float]:
    """Freezes the front in every second step, from the first one on; without a schedule in plain PyTorch."""
    model = module = made("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = None
    if schedule is not None:
        accelerator = Accelerator(plan={"pp": 2}, options={"pipeline": {"schedule": schedule}}, cpu=True)
    losses = []
    for step in range(4):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(step % 2 == 1 or name.startswith(("blocks.3", "head")))
        if step == 0 and accelerator is not None:
            model, optimizer = accelerator.prepare(model, optimizer)
            module = accelerator.unwrap_model(model)
        data = batch("gpt", step)
        if accelerator is None:
            loss = mean_of(model(data[0]), data[1])
            loss.backward()
        else:
            loss = accelerator.forward_backward(model, data, mean_of)
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_front_that_is_frozen_now_and_then(schedule):
    want = losses_with_other_fronts(None)
    for got in run_ranks(losses_with_other_fronts, world=2, args=(schedule,)):
        assert got == pytest.approx(want, abs=2e-6)


def test_a_sequence():
    check("sequence", {"pp": 2}, {"split": "parameters", "schedule": "interleaved"})


def test_batches_of_other_sizes():
    """Sizes that the schedule cannot take are run by another; each size has its own buffers."""
    check("gpt tied", {"pp": 2}, {"microbatches": 4}, rows=(8, 6, 3, 1, 8, 7))


def test_sums_over_items():
    check("gpt", {"pp": 2}, {}, accumulate=1, items=True)


# -- the rest of a run -------------------------------------------------------------------------------------------


def prepared(model, options=None, accumulate=1, **plan):
    accelerator = Accelerator(None, accumulate, plan={"pp": 2, **plan}, options={"pipeline": options or {}}, cpu=True)
    return accelerator, *accelerator.prepare(model, adam(model))


def test_a_window_without_accumulate():
    """Gradients that were settled stay what they are when more are added, of tied weights too."""

    def run():
        accelerator, model, _ = prepared(made("gpt tied"))
        for step in range(3):
            accelerator.forward_backward(model, batch("gpt", step), mean_of)
        return float(accelerator.clip_grad_norm_(model.parameters(), 1e9))

    model = made("gpt tied")
    for step in range(3):
        x, y = batch("gpt", step)
        mean_of(model(x), y).backward()
    want = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert run_ranks(run, world=2) == pytest.approx([want, want], abs=2e-6)


def test_states_are_saved_and_loaded(tmp_path):
    def run():
        accelerator, model, optimizer = prepared(made("gpt tied"), {"schedule": "zbv"})
        accelerator.forward_backward(model, batch("gpt", 0), mean_of)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(tmp_path / "state")
        accelerator.save_model(model, tmp_path / "model")

        def go_on():
            losses = []
            for step in (1, 2):
                losses.append(float(accelerator.forward_backward(model, batch("gpt", step), mean_of)))
                optimizer.step()
                optimizer.zero_grad()
            return losses

        first = go_on()
        accelerator.load_state(tmp_path / "state")
        return first, go_on()

    for first, again in run_ranks(run, world=2):
        assert first == again
    from paceline.checkpoint.weights.model import load_model

    model = made("gpt tied")
    load_model(model, tmp_path / "model")
    with torch.no_grad():
        losses = [float(mean_of(model(x), y)) for x, y in [batch("gpt", 1)]]
    assert losses[0] == pytest.approx(first[0], abs=2e-6)
    from safetensors import safe_open

    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert ("head.weight" in file.keys()) + ("embed.weight" in file.keys()) == 1  # noqa: SIM118


def test_states_of_another_stage_are_not_read(tmp_path):
    """torch compares no shapes: the states of one block would become those of another one."""

    def run():
        accelerator, model, optimizer = prepared(made("gpt"))
        accelerator.forward_backward(model, batch("gpt", 0), mean_of)
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / str(accelerator.process_index))
        accelerator.wait_for_everyone()
        optimizer.load_state_dict(torch.load(tmp_path / str(accelerator.process_index)))
        if accelerator.process_index == 1:
            with pytest.raises(CheckpointError, match="checkpoint-part"):
                torch.load(tmp_path / "0")

    run_ranks(run, world=2)


def test_ranks_that_start_otherwise_take_the_first_ones_values():
    def run(differ):
        model = made("gpt tied")
        if differ:
            torch.manual_seed(100 + torch.distributed.get_rank())
            model = GPT(tied=True)
        accelerator, model, _ = prepared(model)
        state = accelerator.get_state_dict(model)
        return torch.cat([value.flatten() for value in state.values()])

    one, other = run_ranks(run, world=2, args=(True,))
    assert torch.equal(one, other)


def test_the_bubble_is_measured():
    def run():
        accelerator, model, _ = prepared(made("gpt"), {"schedule": "gpipe", "microbatches": 1})
        accelerator.forward_backward(model, batch("gpt", 0), mean_of)
        with measure(model) as meter:
            accelerator.forward_backward(model, batch("gpt", 1), mean_of)
        busy = meter.busy_s
        accelerator.forward_backward(model, batch("gpt", 2), mean_of)
        return meter.bubble, busy == meter.busy_s

    for bubble, closed in run_ranks(run, world=2):
        assert 0 < bubble < 1
        assert closed


def test_half_precision_travels_as_it_is():
    def run(plan):
        model = made("gpt")
        accelerator = Accelerator("bf16", plan=plan, cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for step in range(3):
            losses.append(float(accelerator.forward_backward(model, batch("gpt", step), mean_of)))
            optimizer.step()
            optimizer.zero_grad()
        unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        losses.append(float(accelerator.forward_backward(model, batch("gpt", 3), mean_of)))
        return losses, unwrapped is model

    (want, _), *_ = run_ranks(run, world=1, args=({},))
    for got, same in run_ranks(run, world=2, args=({"pp": 2},)):
        assert got == pytest.approx(want, abs=3e-3)
        assert same


# -- what cannot work is told by name ----------------------------------------------------------------------------


class Skips(GPT):
    """Blocks get the embedding beside the hidden state."""

    def forward(self, tokens):
        x = first = self.embed(tokens)
        for block in self.blocks:
            x = block(x + first)
        return self.head(self.norm(x))


class HeadFirst(GPT):
    """The head is defined before the blocks."""

    def __init__(self):
        super().__init__()
        modules = dict(self._modules)
        self._modules.clear()
        self._modules.update({"head": modules.pop("head"), **modules})


class Twice(GPT):
    """The blocks run twice."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


class Lists(GPT):
    """The blocks take no tensor first."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(*[x]) if block is self.blocks[0] else self.go(block, x)
        return self.head(self.norm(x))

    def go(self, block, x):
        return block([x]) if not isinstance(block, type(self.blocks[0])) else block(x)


class Borrows(GPT):
    """The head is the embedding, used by hand."""

    def __init__(self):
        super().__init__()
        del self.head

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.embed.weight)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(Skips, "pipeline-skip"), (HeadFirst, "pipeline-order"), (Twice, "pipeline-order"), (Lists, "pipeline-hidden")],
)
def test_models_that_no_stage_can_run(kind, code):
    def run():
        accelerator, model, _ = prepared(kind())
        try:
            accelerator.forward_backward(model, batch("gpt", 0), mean_of)
        except PlanError as error:
            return error.code
        return None

    assert run_ranks(run, world=2) == [code, code]


class Slices(GPT):
    """Reads the table of positions itself, without calling the module."""

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_parameter_that_the_first_stage_alone_needs_may_be_read_directly():
    def run():
        torch.manual_seed(3)
        accelerator, model, _ = prepared(Slices())
        accelerator.forward_backward(model, batch("gpt", 0), mean_of)
        return float(accelerator.clip_grad_norm_(model.parameters(), 1e9))

    torch.manual_seed(3)
    model = Slices()
    x, y = batch("gpt", 0)
    mean_of(model(x), y).backward()
    want = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert run_ranks(run, world=2) == pytest.approx([want, want], abs=2e-6)


def test_a_module_that_several_stages_use_can_be_kept_in_all():
    def run(keep):
        torch.manual_seed(3)
        accelerator, model, _ = prepared(Borrows(), {"keep": keep})
        try:
            accelerator.forward_backward(model, batch("gpt", 0), mean_of)
        except PlanError as error:
            return error.code, str(error)
        return float(accelerator.clip_grad_norm_(model.parameters(), 1e9))

    for code, told in run_ranks(run, world=2, args=([],)):
        assert code == "pipeline-skip"
        assert "computes with embed.weight" in told
        assert "'keep': ['embed']" in told
    torch.manual_seed(3)
    model = Borrows()
    x, y = batch("gpt", 0)
    mean_of(model(x), y).backward()
    want = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert run_ranks(run, world=2, args=(["embed"],)) == pytest.approx([want, want], abs=2e-6)


def test_calls_that_no_stage_can_answer():
    def run():
        accelerator, model, _ = prepared(made("gpt"))
        x, y = batch("gpt", 0)
        codes = []
        import copy

        calls = [
            lambda: model(x),
            lambda: accelerator.backward(torch.zeros(())),
            lambda: accelerator.forward_backward(model, (3, y), mean_of),
            lambda: (model.embed(x), model.head(torch.zeros(1, 16))),
            lambda: copy.deepcopy(model)(x),
        ]
        for call_it in calls:
            try:
                call_it()
            except PlanError as error:
                codes.append(error.code)
        return codes

    want = ["pipeline-forward", "backward-pipeline", "pipeline-rows", "pipeline-elsewhere", "pipeline-copy"]
    assert run_ranks(run, world=2) == [want, want]
