"""ZeRO stages 1 and 2: the numbers of whole gradients and states, in a share of the memory."""

import gc
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks
from torch import nn
from torch.nn.functional import mse_loss

from paceline import Accelerator
from paceline.base.errors import TrainError
from paceline.world.sharded import is_sharded, whole
from paceline_large.optim.lamb import Lamb
from paceline_large.optim.lion import Lion


class Net(nn.Module):
    """Tied, frozen, unused, 0-dim and one-row parameters, large ones and small ones, even and uneven ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(6, 257), nn.Linear(257, 257), nn.Linear(257, 257)
        self.frozen.requires_grad_(False)
        self.out, self.tied, self.unused = nn.Linear(257, 5), nn.Linear(257, 5), nn.Linear(3, 3)
        self.tied.weight = self.out.weight
        self.scale, self.row = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(1, 257))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.frozen(torch.tanh(self.second(torch.tanh(self.first(x))) * self.row)))
        return (self.out(x) + self.tied(x * 0.5)) * self.scale


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 5, generator=generator)


def own(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    layout = accelerator.plan.layout
    return tensor.chunk(layout.width)[layout.data_index(dist.get_rank() if dist.is_initialized() else 0)]


OURS = {"Lion": Lion, "Lamb": Lamb}


def make(kind: str, seed: int = 0) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    net = Net()
    trained = [p for p in net.parameters() if p.requires_grad]
    options = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
    if kind == "Muon":
        matrices, others = [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2]
        return net, [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
    groups = [{"params": trained[:3], "lr": 0.02}, {"params": [*trained[3:], net.frozen.weight]}]
    return net, [getattr(torch.optim, kind, OURS.get(kind))(groups, lr=0.01, **options)]


class Run:
    """A loop under a plan; on every rank the same batches."""

    def __init__(self, plan: dict, kind: str = "SGD", accumulate: int = 1, seed: int = 0) -> None:
        self.accelerator = Accelerator("no", accumulate, plan=plan, cpu=True)
        net, optimizers = make(kind, seed)
        self.model, *self.optimizers = self.accelerator.prepare(net, *optimizers)
        self.accumulate, self.norms = accumulate, []

    def train(self, *numbers: int, clip: float | None = None) -> "Run":
        for number in numbers:
            for micro in range(self.accumulate):
                with self.accelerator.accumulate(self.model):
                    x, y = (own(self.accelerator, each) for each in batch(number * 10 + micro))
                    self.accelerator.backward(mse_loss(self.model(x), y))
                    if self.accelerator.sync_gradients and clip:
                        self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), clip)))
                    for optimizer in self.optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
        return self

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.accelerator.unwrap_model(self.model).parameters()]


def plain(steps: int, accumulate: int, clip: float) -> tuple[list[torch.Tensor], list[float]]:
    """The reference without Paceline: SGD on whole batches."""
    net, (optimizer,) = make("SGD")
    norms = []
    for number in range(steps):
        for micro in range(accumulate):
            x, y = batch(number * 10 + micro)
            (mse_loss(net(x), y) / accumulate).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()], norms


@pytest.mark.parametrize(
    ("world", "plan", "accumulate"),
    [
        (2, {"shard": 2, "zero": 1}, 2),
        (2, {"shard": 2, "zero": 2}, 2),
        (3, {"shard": 3, "zero": 1}, 1),
        (3, {"shard": 3, "zero": 2}, 1),
        (4, {"shard": 2, "replicate": 2, "zero": 1}, 1),
        (4, {"shard": 2, "replicate": 2, "zero": 2}, 2),
    ],
)
def test_gives_the_numbers_of_one_process(world, plan, accumulate) -> None:
    weights, norms = plain(3, accumulate, 0.3)

    def body() -> tuple[list[torch.Tensor], list[float]]:
        run = Run(plan, accumulate=accumulate).train(0, 1, 2, clip=0.3)
        return run.weights(), run.norms

    for theirs, found in run_ranks(body, world):
        torch.testing.assert_close(theirs, weights, rtol=0, atol=2e-6)
        assert found == pytest.approx(norms, abs=2e-6)


ELEMENTWISE = [
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "RMSprop",
    "NAdam",
    "RAdam",
    "ASGD",
    "Rprop",
    "Lion",
]


@pytest.mark.parametrize("zero", [1, 2])
def test_every_optimizer_steps_as_without_division(zero) -> None:
    def body() -> list[str]:
        wrong = []
        for kind in [*ELEMENTWISE, "Adafactor", "Muon", "Lamb"]:
            expected = Run({"replicate": 2}, kind).train(0, 1, 2).weights()
            run = Run({"shard": 2, "zero": zero}, kind).train(0, 1, 2)
            # A fused kernel rounds the last few elements of a tensor otherwise, and rows end elsewhere.
            if not all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(run.weights(), expected, strict=True)):
                wrong.append(kind)
            (how,) = {d.value for d in run.accelerator.plan.decisions if d.field == f"optimizer.{kind}.divided"}
            assert how == ("rows" if kind in ELEMENTWISE else "parameters")
        return wrong

    assert run_ranks(body, 2) == [[], []]


class Transposed(nn.Module):
    """A parameter whose rows are not contiguous in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 6).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator | None = None) -> torch.Tensor:
    for number in range(2):
        x, y = batch(number)
        loss = mse_loss(net(x), y)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return next(net.parameters()).detach()


def test_a_transposed_parameter_is_stepped_as_by_one_process() -> None:
    def body() -> None:
        plain_net = Transposed()
        expected = stepped(plain_net, torch.optim.AdamW(plain_net.parameters(), lr=0.1))
        for zero, fused in ((1, None), (1, True), (2, None), (2, True)):
            net = Transposed()
            accelerator = Accelerator(cpu=True, plan={"shard": 2, "zero": zero})
            prepared = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused))
            torch.testing.assert_close(stepped(*prepared, accelerator), expected)

    run_ranks(body, 2)


class Toy(torch.optim.SGD):
    """Says that it treats each element alone."""

    elementwise = True


class Heir(Toy):
    """May step otherwise, and says nothing itself."""


def test_an_optimizer_says_itself_that_it_is_elementwise() -> None:
    def divided() -> list[str]:
        found = []
        for kind in (Toy, Heir):
            accelerator = Accelerator(cpu=True, plan={"shard": 2, "zero": 1})
            model = nn.Linear(4, 4)
            accelerator.prepare(model, kind(model.parameters(), lr=0.1))
            field = f"optimizer.{kind.__name__}.divided"
            found += [decision.value for decision in accelerator.plan.decisions if decision.field == field]
        return found

    assert run_ranks(divided, 2) == [["rows", "parameters"]] * 2


def storages(tensors) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.dim()}.values())


@pytest.mark.parametrize("world", [2, 4])
def test_memory_at_rest_is_the_formula(world) -> None:
    def body() -> None:
        for zero in (1, 2):
            accelerator = Accelerator(plan={"shard": world, "zero": zero}, cpu=True)
            # The first message between ranks allocates their buffers, whose size does not depend on the model.
            accelerator.wait_for_everyone()
            inherited = {id(each): each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)}
            net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 1024))
            model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
            for _ in range(2):
                optimizer.zero_grad()
                accelerator.backward(model(torch.ones(2, 256)).sum())
                optimizer.step()
            a = sum(p.numel() * 4 for p in net.parameters())
            gc.collect()
            live = {}
            for each in gc.get_objects():
                if type(each) in (torch.Tensor, nn.Parameter) and each.dim() and id(each) not in inherited:
                    live[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
            states = storages(t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
            gradients = storages(p.grad._local_tensor if is_sharded(p.grad) else p.grad for p in net.parameters())
            assert states <= 1.01 * 2 * a / world
            assert gradients <= 1.01 * (a if zero == 1 else a / world)
            formula = 2 * a + 2 * a / world if zero == 1 else a + 3 * a / world
            assert sum(live.values()) <= 1.05 * formula
            del model, optimizer, net, live, each, inherited
            gc.collect()

    run_ranks(body, world)


def whole_states(run: Run) -> list[dict]:
    found = []
    for optimizer in run.optimizers:
        state = optimizer.state_dict()["state"]
        found.append({key: {name: whole(v) for name, v in s.items()} for key, s in sorted(state.items())})
    return found


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, {"shard": 2, "zero": 1}), (2, {"shard": 2, "zero": 1})),
        ((2, {"shard": 2, "zero": 2}), (3, {"shard": 3, "zero": 1})),
        ((3, {"shard": 3, "zero": 1}), (1, {})),
        ((2, {"replicate": 2}), (2, {"shard": 2, "zero": 2})),
    ],
)
def test_states_are_saved_and_loaded_at_any_width(tmp_path, kind, before, after) -> None:
    folder = str(tmp_path / "c")

    def save() -> list[torch.Tensor]:
        run = Run(before[1], kind).train(0, 1)
        run.accelerator.save_state(folder)
        return run.train(2, 3).weights()

    def load() -> list[torch.Tensor]:
        run = Run(after[1], kind, seed=1)
        run.accelerator.load_state(folder)
        return run.train(2, 3).weights()

    expected = run_ranks(save, before[0])[0]
    exact = before == after
    for weights in run_ranks(load, after[0]) if after[0] > 1 else [load()]:
        tolerance = 0 if exact else 2e-3 if kind == "Muon" else 2e-4  # both enlarge the rounding of small gradients
        torch.testing.assert_close(weights, expected, rtol=0, atol=tolerance)


def test_state_dicts_are_dtensors_and_loads_take_whole_ones() -> None:
    def body() -> None:
        run = Run({"shard": 2, "zero": 1}, "AdamW").train(0, 1)
        (state,) = (o.state_dict() for o in run.optimizers)
        assert any(is_sharded(v) and v.shape == (257, 257) for s in state["state"].values() for v in s.values())
        plain_state = {**state, "state": {k: {n: whole(v) for n, v in s.items()} for k, s in state["state"].items()}}
        plain_state = deepcopy(plain_state)
        expected = deepcopy(run.weights())
        other = Run({"shard": 2, "zero": 1}, "AdamW")
        with torch.no_grad():
            for mine, theirs in zip(other.model.parameters(), expected, strict=True):
                mine.copy_(theirs)
        other.optimizers[0].load_state_dict(plain_state)
        assert all(map(torch.equal, other.train(2).weights(), run.train(2).weights()))

    run_ranks(body, 2)


def test_backward_passes_add_up_until_gradients_are_cleared() -> None:
    def body() -> None:
        found = []
        for plan in ({"replicate": 2}, {"shard": 2, "zero": 2}):
            accelerator = Accelerator(plan=plan, cpu=True)
            net, _ = make("SGD")
            model = accelerator.prepare(net)
            for number in (0, 1):  # two losses of one step: each backward ends a window
                x, y = (own(accelerator, each) for each in batch(number))
                accelerator.backward(mse_loss(model(x), y))
            with accelerator.no_sync(model):
                accelerator.backward(model(own(accelerator, batch(2)[0])).square().mean())
            accelerator.backward(model(own(accelerator, batch(3)[0])).square().mean())
            found.append([None if p.grad is None else whole(p.grad) for p in net.parameters()])
        replicated, divided = found
        assert [g is None for g in replicated] == [g is None for g in divided]
        for one, other in zip(replicated, divided, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=0, atol=1e-6)

    run_ranks(body, 2)


def test_parameters_that_some_ranks_leave_out() -> None:
    """What one rank uses counts with the others' zeros; what none uses keeps no gradient; two models in one loss."""

    def body() -> None:
        accelerator = Accelerator(plan={"shard": 2, "zero": 2}, cpu=True)
        torch.manual_seed(0)
        nets = [nn.ModuleList([nn.Linear(2, 300), nn.Linear(2, 3), nn.Linear(2, 3)]) for _ in range(2)]
        one, two = accelerator.prepare(*nets)
        rank = dist.get_rank()
        x = torch.ones(1, 2)
        used = (one, two) if rank else (two, one)  # the graphs differ, and so the order of the buckets
        loss = sum(net[0](x).sum() for net in used) + one[rank](x).sum() * 3
        accelerator.backward(loss)
        for net in (one, two):
            assert net[2].weight.grad is None
            assert net[0].weight.grad.full_tensor()[0, 0] == (2.5 if net is one else 1)
        assert one[1].weight.grad.full_tensor()[0, 0] == 1.5
        assert two[1].weight.grad is None
        accelerator.backward(two[0](x).sum())  # and a window without the first
        assert two[0].weight.grad.full_tensor()[0, 0] == 2 and one[0].weight.grad.full_tensor()[0, 0] == 2.5

    run_ranks(body, 2)


@pytest.mark.parametrize("plan", [{"shard": 2, "zero": 2}, {"shard": 2, "replicate": 2, "zero": 2}])
def test_a_parameter_that_a_checkpoint_uses_twice(plan) -> None:
    """A reentrant checkpoint runs a backward pass of its own: a gradient that comes twice counts twice."""

    def body() -> float:
        accelerator = Accelerator(plan=plan, cpu=True)
        torch.manual_seed(0)
        layer = accelerator.prepare(nn.Linear(300, 300))
        inner = accelerator.unwrap_model(layer)
        rank = dist.get_rank() + 1.0
        x = torch.full((1, 300), rank, requires_grad=True)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=True)
        accelerator.backward(x.sum())
        reduced = inner.weight.grad.full_tensor()
        again = deepcopy(inner)
        for number in range(dist.get_world_size()):
            (again(again(torch.full((1, 300), number + 1.0))).sum() / dist.get_world_size()).backward()
        return float((reduced - again.weight.grad).abs().max() / reduced.abs().max())

    assert max(run_ranks(body, 2 * plan.get("replicate", 1))) < 1e-6


def test_hooks_and_schedulers_see_whole_parameters() -> None:
    def body() -> None:
        run = Run({"shard": 2, "zero": 2}, "SGD")
        (optimizer,) = run.optimizers
        seen = []

        def look(*_) -> None:
            seen.append([tuple(p.shape) for g in optimizer.param_groups for p in g["params"]])

        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        run.train(0)
        shapes = [tuple(p.shape) for g in optimizer.param_groups for p in g["params"]]
        assert seen == [shapes, shapes] and (257, 257) in shapes

        def broken() -> None:
            raise RuntimeError("in the middle")

        optimizer.optimizer._optimizer_step_code = broken
        with pytest.raises(RuntimeError, match="in the middle"):
            run.train(1)
        assert [tuple(p.shape) for g in optimizer.param_groups for p in g["params"]] == shapes

    run_ranks(body, 2)


def test_states_of_before_are_divided_and_line_searches_refused() -> None:
    def body() -> None:
        expected = Run({"replicate": 2}, "Adam").train(0, 1, 2).weights()
        net, (optimizer,) = make("Adam")
        x, y = batch(0)
        mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        run = Run({"shard": 2, "zero": 1}, "Adam")
        run.model, *run.optimizers = run.accelerator.prepare(net, optimizer)
        torch.testing.assert_close(run.train(1, 2).weights(), expected, rtol=0, atol=2e-4)
        states = [s["exp_avg"].numel() for s in optimizer.state.values()]
        assert sum(states) < 0.6 * sum(p.numel() for p in net.parameters() if p.requires_grad)

        other = nn.Linear(2, 2)
        with pytest.raises(TrainError) as caught:
            run.accelerator.prepare(other, torch.optim.LBFGS(other.parameters()))
        assert caught.value.code == "step-closure"

    run_ranks(body, 2)


def test_an_overflow_on_one_rank_is_seen_by_all() -> None:
    def body() -> None:
        accelerator = Accelerator("fp16", plan={"shard": 2, "zero": 2}, cpu=True, scaler={"init_scale": 1024.0})
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 2))
        net.scale = nn.Parameter(torch.tensor(1.0))
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        before = [p.detach().clone() for p in net.parameters()]
        for step in range(2):
            x = torch.ones(2, 4)
            loss = (model(x) * net.scale).sum()
            if step == 0:
                accelerator.backward(loss)
                with torch.no_grad():
                    if dist.get_rank() == 1:
                        net[0].weight.grad._local_tensor[0, 0] = float("inf")
            else:
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            same = all(map(torch.equal, before, net.parameters()))
            assert same == (step == 0) and optimizer.step_was_skipped == (step == 0)

    run_ranks(body, 2)


@pytest.mark.parametrize("norm", [nn.SyncBatchNorm, nn.BatchNorm2d])
def test_buffers_and_batch_statistics(norm) -> None:
    def body() -> torch.Tensor:
        accelerator = Accelerator(plan={"shard": 2, "zero": 2}, cpu=True)
        torch.manual_seed(dist.get_rank())
        net = nn.Sequential(nn.Conv2d(2, 4, 3), norm(4), nn.Flatten(), nn.Linear(64, 2))
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for step in range(2):
            x = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if norm is nn.BatchNorm2d:  # each rank's own, so that rank 0's count
            model(torch.ones(4, 2, 6, 6))
            if dist.get_rank() == 0:
                deepcopy(model)(torch.randn(4, 2, 6, 6))  # a copy does not communicate
        return torch.cat([t.detach().float().flatten() for t in net.state_dict().values()])

    one, two = run_ranks(body, 2)
    assert torch.equal(one, two)


def test_cleared_gradients_may_stay_zeros() -> None:
    """`zero_grad(set_to_none=False)` leaves DTensors of zeros, also where no rank uses the parameter next."""

    def body() -> None:
        found = []
        for plan in ({"replicate": 2}, {"shard": 2, "zero": 2}):
            accelerator = Accelerator(
                plan=plan,
                cpu=True,
            )
            torch.manual_seed(0)
            net = nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3)])
            net.forward = lambda x, used, net=net: net[used](x)
            model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
            for used in (0, 1, 0):
                accelerator.backward(model(torch.ones(1, 2), used).square().sum())
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            found.append([p.detach().clone() for p in net.parameters()])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)

    run_ranks(body, 2)


def test_ranks_that_leave_out_parameters_do_not_wait_for_each_other() -> None:
    """More gradients than may be on their way at once: rank 1 waits for the bucket that rank 0 has nothing for."""

    def body() -> None:
        accelerator = Accelerator(plan={"shard": 2, "zero": 2}, options={"zero": {"bucket_cap_mb": 1e-4}}, cpu=True)
        net = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        net.forward = lambda x, used: sum(net[number](x).sum() for number in used)
        model = accelerator.prepare(net)
        rank = dist.get_rank()
        accelerator.backward(model(torch.ones(1, 6), range(6) if rank else (0, 1, 3)))
        assert [float(m.bias.grad.full_tensor()[0]) for m in net] == [1, 1, 0.5, 1, 0.5, 0.5]

    run_ranks(body, 2, timeout_s=30)


GROWING = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
}


def grown(plan, kind):
    """Trains, gets a layer that was not there in `prepare`, and trains on; returns the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    optimizer = GROWING[kind](model.parameters())
    backward = torch.Tensor.backward
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    if plan is not None:
        accelerator = Accelerator(cpu=True, plan=plan)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    for step in range(6):
        if step == 3:
            torch.manual_seed(1)
            model.append(nn.Linear(4, 3).double())
            # By its list, of which `add_param_group` knows nothing.
            optimizer.param_groups[0]["params"] += model[3].parameters()
        backward(model((step + 1) * x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_layer_that_no_strategy_saw_is_stepped_as_on_one_process(stage, kind) -> None:
    for weights in run_ranks(grown, 3, args=({"shard": 3, "zero": stage}, kind)):
        torch.testing.assert_close(weights, grown(None, kind), rtol=0, atol=1e-10)
