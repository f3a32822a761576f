"""DeepSpeed's engine on ours: its numbers are those of a plain loop on one process, at every stage and window."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import ConfigError, PacelineError, TrainError
from paceline.compat import install
from paceline.testing import RankFailed, run_ranks
from paceline_deepspeed.arguments import checked
from paceline_deepspeed.initialize import initialize
from paceline_deepspeed.processes import init_distributed
from paceline_deepspeed.schedules import WarmupLR
from paceline_deepspeed.tensor_parallel import tp_model_init

ROWS = 12
ADAM = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def divisible() -> nn.Module:
    """The model with a table of what tensor parallel divides, as models of transformers have one."""
    net = model()
    net._tp_plan = {"0": "colwise", "2": "rowwise"}
    return net


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(ROWS, 8, generator=draw), torch.randint(0, 4, (ROWS,), generator=draw)) for _ in range(steps)]


def config(**keys) -> dict:
    return {"train_batch_size": ROWS, "optimizer": ADAM, "gradient_clipping": 0.0, **keys}


def micro(engine, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    """The loss of one micro-batch of a step."""
    rows = engine.train_micro_batch_size_per_gpu()
    at = (number * engine.dp_world_size + engine.get_data_parallel_rank()) * rows
    return cross_entropy(engine(x[at : at + rows]), y[at : at + rows])


def run(engine, steps: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    for x, y in batches(steps):
        for number in range(engine.gradient_accumulation_steps()):
            engine.backward(micro(engine, x.to(dtype), y, number))
            engine.step()
    return engine.module_state_dict()


def plain(clip: float, steps: int = 3) -> dict[str, torch.Tensor]:
    """What any of these runs should come to."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for x, y in batches(steps):
        cross_entropy(net(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def start(keys: dict, **named):
    return initialize(model=named.pop("net", None) or model(), config=keys, **named)[0]


# -- numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "clips"), [(1, [0.1]), (2, [0.0, 0.1]), (3, [0.1])])
def test_each_stage_window_and_clip_equals_one_process(world: int, clips: list[float]) -> None:
    def work() -> dict:
        found = {}
        for stage, window, clip in itertools.product((0, 1, 2, 3), (1, 2), clips):
            keys = config(
                gradient_accumulation_steps=window, gradient_clipping=clip, zero_optimization={"stage": stage}
            )
            engine = start(keys)
            found[stage, window, clip] = run(engine)
            norm = engine.get_global_grad_norm()
            assert norm is None if stage == 0 and not clip else 0.1 < norm < 10
            assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 3 * window, 3 * ROWS)
            assert engine.get_batch_info() == (ROWS, ROWS // world // window, window)
        return found

    for (stage, window, clip), weights in run_ranks(work, world)[-1].items():
        assert apart(weights, plain(clip)) < 2e-6, f"stage {stage}, window {window}, clip {clip}"


def test_a_model_is_trained_after_an_engine_without_an_optimizer_evaluated_it(tmp_path) -> None:
    def work() -> dict:
        found = {}
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("paceline").addHandler(handler)
        for stage in (0, 2, 3):
            net = model()
            # As trl's DPO does for its reference values: at stage 3 divided, otherwise whole.
            evaluating = start({"train_batch_size": ROWS, "zero_optimization": {"stage": stage // 3 * 3}}, net=net)
            with torch.no_grad():
                before = evaluating.eval()(batches(1)[0][0])
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
            keys = {"train_batch_size": ROWS, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage}}
            if stage == 3:
                keys["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
            if stage == 2:
                on_disk = {"device": "nvme", "nvme_path": str(tmp_path)}
                keys["zero_optimization"]["offload_optimizer"] = on_disk
            engine = start(keys, optimizer=optimizer, net=net)
            found[stage] = run(engine.train())
            with torch.no_grad():
                assert (evaluating(batches(1)[0][0]) - before).abs().max() > 1e-3, "it shares the weights"
        assert sum("offload stays" in line for line in said) == engine.accelerator.is_main_process
        return found

    for stage, weights in run_ranks(work, 2)[-1].items():
        assert apart(weights, plain(0.0)) < 2e-6, f"stage {stage}"


class WithExtraLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = model()
        self.extra = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, with_extra: bool) -> torch.Tensor:
        if with_extra:
            x = x + self.extra(x)
        return self.layers(x)


# Whether the loss uses the extra layer: in each step for the first and for the second half of the rows. A layer that the first
# step uses and a later one does not is what DDP refuses.
USED = ((True, True), (False, False), (True, False), (False, True), (False, False))


@pytest.mark.parametrize("world", [1, 2])
def test_a_layer_that_the_loss_does_not_use_has_gradients_of_zeros(world: int) -> None:
    """So deepspeed 0.19.8 does at each stage and on each number of processes: weight decay and momentum go on."""
    same_on_all_ranks = tuple((first, first) for first, _ in USED)

    def work() -> dict:
        weights = {}
        for stage, usage in ((0, USED), (1, USED), (2, USED), (3, same_on_all_ranks)):
            keys = config(zero_optimization={"stage": stage}, gradient_accumulation_steps=2 // world)
            engine = start(keys, net=WithExtraLayer())
            for (x, y), used in zip(batches(len(usage)), usage, strict=True):
                for number in range(2 // world):
                    half = number + engine.get_data_parallel_rank()
                    rows = slice(half * ROWS // 2, (half + 1) * ROWS // 2)
                    engine.backward(cross_entropy(engine(x[rows], used[half]), y[rows]))
                    engine.step()
            weights[stage] = engine.module_state_dict()
        return weights

    def expected(usage: tuple) -> dict:
        net = WithExtraLayer()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
        for (x, y), used in zip(batches(len(usage)), usage, strict=True):
            optimizer.zero_grad()
            for half, (own_x, own_y) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
                (cross_entropy(net(own_x, used[half]), own_y) / 2).backward()
            for parameter in net.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        return net.state_dict()

    for stage, weights in run_ranks(work, world)[-1].items():
        assert apart(weights, expected(same_on_all_ranks if stage == 3 else USED)) < 2e-6, f"stage {stage}"


class WithCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = model()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum()
        return self.layers(x)


def test_each_rank_keeps_its_own_buffers() -> None:
    """So in deepspeed 0.19.8, which sends parameters alone."""

    def work() -> list:
        kept = []
        for stage in range(4):
            engine = start(config(zero_optimization={"stage": stage}), net=WithCounter())
            for _ in range(3):
                engine.backward(engine(torch.full((6, 8), float(engine.global_rank))).sum())
                engine.step()
            kept.append(engine.module.seen.item())
        return kept

    assert run_ranks(work, world=2) == [[0.0] * 4, [144.0] * 4]


def test_clipping_is_one_unless_it_is_said() -> None:
    def work() -> tuple[dict, dict]:
        keys = config(optimizer={"type": "SGD", "params": {"lr": 0.1}})
        del keys["gradient_clipping"]
        steep = lambda engine: 1e4 * micro(engine, *batches(1)[0], 0)  # noqa: E731
        found = []
        for said in (keys, {**keys, "gradient_clipping": 0}):
            engine = start(said)
            engine.backward(steep(engine))
            engine.step()
            found.append(apart(engine.module_state_dict(), model().state_dict()))
        return found

    clipped, free = run_ranks(work, 1)[0]
    assert clipped < 0.1 and free > 10


def test_a_scheduler_without_its_metric_and_an_optimizer_without_its_closure() -> None:
    def work() -> None:
        engine = start(config(scheduler={"type": "ReduceLROnPlateau", "params": {"patience": 0, "factor": 0.5}}))
        before = copy.deepcopy(engine.module_state_dict())
        engine.backward(micro(engine, *batches(1)[0], 0))
        with pytest.raises(TrainError, match=r"engine.step\(lr_kwargs=\{'metrics': loss.item\(\)\}\)") as caught:
            engine.step()
        assert caught.value.code == "deepspeed-metric"
        assert apart(engine.module_state_dict(), before) == 0.0
        engine.step(lr_kwargs={"metrics": 1.0})
        engine.backward(micro(engine, *batches(1)[0], 0))
        engine.step(lr_kwargs={"metrics": 2.0})
        assert engine.global_steps == 2 and engine.get_lr() == [0.005]
        net, keys = model(), config()
        del keys["optimizer"]
        with pytest.raises(ConfigError, match="deepspeed-optimizer"):
            start(keys, optimizer=torch.optim.LBFGS(net.parameters()), net=net)

    run_ranks(work, 1)


def test_the_scheduler_of_an_engine_is_what_it_says_and_may_become_another(tmp_path) -> None:
    def work() -> None:
        keys = config(optimizer={"type": "SGD", "params": {"lr": 0.4}})
        engine = start({**keys, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}})
        assert isinstance(engine.lr_scheduler, WarmupLR)
        engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.5)
        assert isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
        rate = engine.get_lr()[0]

        def step() -> None:
            for number in range(engine.gradient_accumulation_steps()):
                engine.backward(micro(engine, *batches(1)[0], number))
                engine.step()

        step()
        assert engine.get_lr() == [rate / 2]
        engine.save_checkpoint(tmp_path)
        step()
        engine.load_checkpoint(tmp_path)
        assert engine.lr_scheduler.last_epoch == 1 and engine.get_lr() == [rate / 2]
        engine.lr_scheduler = None
        step()
        assert engine.get_lr() == [rate / 2]
        del keys["optimizer"]
        with pytest.raises(ConfigError, match="evaluated alone"):
            start(keys)._configure_optimizer(torch.optim.SGD, None)

    run_ranks(work, 1)


def test_other_ways_through_a_window_come_to_the_same() -> None:
    def by_hand(engine) -> dict:
        for x, y in batches(3):
            for number in range(engine.gradient_accumulation_steps()):
                engine.scale(micro(engine, x, y, number)).backward()
                engine.step()
        return engine.module_state_dict()

    def held(engine) -> dict:
        for x, y in batches(3):
            with engine.no_sync():
                engine.backward(micro(engine, x, y, 0) / 2)
                with pytest.raises(TrainError, match="deepspeed-step"):
                    engine.step()
            engine.backward(micro(engine, x, y, 1) / 2)
            engine.step()
        return engine.module_state_dict()

    def said(engine) -> dict:
        for x, y in batches(3):
            for number in range(2):
                engine.set_gradient_accumulation_boundary(number == 1)
                assert engine.is_gradient_accumulation_boundary() is (number == 1)
                engine.backward(micro(engine, x, y, number), scale_wrt_gas=number == 2)
                engine.step()
                assert engine.was_step_applied() is (number == 1)
        return engine.module_state_dict()

    def unmanaged(engine) -> dict:
        for x, y in batches(3):
            for number in range(2):
                engine.backward(micro(engine, x, y, number))
                assert not engine.is_gradient_accumulation_boundary()
            engine.step()
            assert engine.was_step_applied()
        # Of one window more with one micro-batch: what a window has is counted.
        engine.backward(0.0 * micro(engine, x, y, 0))
        seen = copy.deepcopy(engine.module_state_dict())
        before = engine.global_samples
        engine.step()
        assert before == 3 * ROWS and engine.global_samples == before + ROWS // 2
        with pytest.raises(ConfigError, match="deepspeed-window"):
            engine.set_gradient_accumulation_boundary(True)
        return seen

    def averaged_by_hand(engine) -> dict:
        engine.enable_backward_allreduce = False
        for x, y in batches(3):
            engine.backward(micro(engine, x, y, 0))
            engine.allreduce_gradients()  # nothing yet: the window goes on
            engine.step()
            engine.backward(micro(engine, x, y, 1))
            with pytest.raises(TrainError, match="deepspeed-step"):
                engine.step()
            engine.allreduce_gradients()
            engine.step()
        return engine.module_state_dict()

    def rebatched(engine) -> dict:
        engine.set_train_batch_size(ROWS)
        assert engine.get_batch_info() == (ROWS, 3, 2)
        return run(engine)

    def work() -> list[dict]:
        found = []
        for stage in (0, 1, 2, 3):
            keys = {"zero_optimization": {"stage": stage}}
            window = config(**keys, gradient_accumulation_steps=2)
            found.append(by_hand(start(window)))
            half = config(**keys, train_batch_size=None, train_micro_batch_size_per_gpu=3)
            found.append(held(start({name: value for name, value in half.items() if value is not None})))
            found.append(
                said(start({**window, "optimizer": {"type": "AdamW", "params": {**ADAM["params"], "eps": 1e-8}}}))
            )
            found.append(unmanaged(start({**window, "managed_gradient_accumulation": False})))
            found.append(rebatched(start(config(**keys, gradient_accumulation_steps=1, train_batch_size=6))))
            found.append(averaged_by_hand(start(window)))
        return found

    for number, weights in enumerate(run_ranks(work, 2)[0]):
        # Adam forgets the scale of gradients, so what was not divided by the window differs by its epsilon alone.
        assert apart(weights, plain(0.0)) < (2e-6 if number % 6 != 2 else 2e-5), number


# -- precision -------------------------------------------------------------------------------------------------


def test_a_step_that_overflows_is_left_out() -> None:
    def work() -> None:
        schedule = {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10, "warmup_type": "linear"},
        }
        for stage, kind in itertools.product((0, 2, 3), ("fp16", "bf16")):
            keys = {kind: {"enabled": True}, "zero_optimization": {"stage": stage}, "scheduler": schedule}
            engine, optimizer, *_ = initialize(model=model(), config=config(**keys))
            assert engine.fp16_enabled() is (kind == "fp16") and engine.bfloat16_enabled() is (kind == "bf16")
            run(engine, 2)
            before, rates = copy.deepcopy(engine.module_state_dict()), []
            for factor in (float("nan"), float("inf"), 1.0):
                rates.append(engine.get_lr()[0])
                engine.backward(micro(engine, *batches(1)[0], 0) * (factor if engine.global_rank == 0 else 1.0))
                engine.step()
                assert engine.was_step_applied() is (factor == 1.0)
                assert optimizer.overflow is (factor != 1.0)
                assert (apart(engine.module_state_dict(), before) == 0) is (factor != 1.0)
                assert (engine.get_global_grad_norm().item() == float("inf")) is (factor != 1.0)
            assert rates[0] == rates[1] == rates[2] < engine.get_lr()[0]
            assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (5, 2, 5 * ROWS)
            assert engine.loss_scale() == (2.0**15 if kind == "fp16" else 1.0)

    run_ranks(work, 2)


def test_bf16_steps_on_what_overflowed_where_nobody_checks() -> None:
    def work() -> bool:
        engine = start(config(bf16={"enabled": True, "check_grad_overflow": False}))
        engine.backward(micro(engine, *batches(1)[0], 0) * float("nan"))
        engine.step()
        return engine.was_step_applied() and bool(torch.isnan(engine.module_state_dict()["0.weight"]).any())

    assert run_ranks(work, 1) == [True]


@pytest.mark.parametrize(("dtype", "block"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_zero_steps_a_model_of_16_bits_in_float32(dtype: torch.dtype, block: str) -> None:
    """As in deepspeed 0.19.8, where the config says nothing: steps of 1e-4 are lost in 16 bits beside weights of 0.3.

    A loss of float16 is scaled by what the `fp16` block says, although it is not on.
    """

    def work() -> list[tuple[bool, int]]:
        found = []
        scale = {"initial_scale_power": 20, "hysteresis": 1} if block == "fp16" else {}
        for stage in range(4):
            keys = config(zero_optimization={"stage": stage}, optimizer={"type": "Adam", "params": {"lr": 1e-4}})
            silent_engine = start({**keys, "fp16": scale}, net=model().to(dtype))
            silent = run(silent_engine, 8, dtype=dtype)
            said = run(start({**keys, block: {"enabled": True, **scale}}, net=model().to(dtype)), 8, dtype=dtype)
            is_equal = all(torch.equal(silent[name].float(), said[name].float()) for name in said)
            found.append((is_equal, silent_engine.skipped_steps))
        return found

    for (at_stage_0, _), *of_zero in run_ranks(work, 2):
        assert not at_stage_0
        assert all(is_equal and (skipped > 0) is (block == "fp16") for is_equal, skipped in of_zero)


def test_a_layer_that_is_frozen_in_mid_run_stays_as_it_is() -> None:
    """At stages 0 and 1 it got a gradient of zeros once more, by which momentum and weight decay changed it."""

    def work() -> list[list[bool]]:
        found = []
        for stage in range(4):
            engine = start(config(zero_optimization={"stage": stage}))
            before = {name: value.clone() for name, value in run(engine, 2).items()}
            first, second, *_ = engine.module.parameters()
            first.requires_grad_(False)
            second.requires_grad_(False)
            after = run(engine, 1)
            found.append([torch.equal(before[name], after[name]) for name in before])
        return found

    assert run_ranks(work, 2) == [[[True, True, False, False]] * 4] * 2


def test_rank_0_that_takes_the_state_of_a_divided_model_alone_is_told_and_the_others_too() -> None:
    def work() -> str:
        engine = start(config(zero_optimization={"stage": 3}))
        run(engine, 1)
        with pytest.raises(PacelineError) as failure:
            if dist.get_rank() == 0:
                engine.module_state_dict()
            run(engine, 1)
        return failure.value.code

    assert run_ranks(work, 2, timeout_s=60) == ["collective-mismatch", "shard-diverged"]


class Scorer(nn.Module):
    """A model with a method beside its forward, a frozen layer, and a layer that computes in float32 for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen, self.norm, self.head = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 4),
        )
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        with torch.autocast("cpu", enabled=False):
            hidden = self.frozen(hidden.to(self.frozen.weight.dtype))
        return self.head(self.norm(hidden))

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.first(x) + self.frozen(x)))


def test_methods_around_the_forward_pass_compute_in_16_bits() -> None:
    def work() -> None:
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
        for stage, trains in itertools.product((0, 2, 3), (True, False)):
            keys = config(bf16={"enabled": True}, zero_optimization={"stage": stage})
            if not trains:
                del keys["optimizer"]
            engine, *_ = initialize(model=Scorer(), config=keys)
            module = engine.module
            assert module.first.weight.dtype == (torch.float32 if trains or stage == 3 else torch.bfloat16)
            assert module.frozen.weight.dtype == torch.bfloat16  # half of the memory, as there
            assert engine(x).dtype == torch.float32  # the frozen layer has found the autocast of the model's own
            scores = Scorer().bfloat16().score(x.bfloat16())
            for method in (engine.score, module.score):
                for inputs in (x, x.bfloat16()):
                    found = method(inputs)
                    assert found.dtype == torch.bfloat16
                    assert torch.allclose(found, scores, atol=2e-2)
            if trains:
                engine.backward(module.score(x).float().square().mean())
                engine.step()
                assert engine.was_step_applied()

    run_ranks(work, 2)


# -- what it is made of ----------------------------------------------------------------------------------------


def test_the_arguments_of_initialize() -> None:
    def work() -> None:
        net = model()
        groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}]
        engine, optimizer, loader, scheduler = initialize(model=net, model_parameters=groups, config=config())
        assert (loader, scheduler, engine.get_lr()) == (None, None, [0.5, 1e-2])
        assert engine.get_mom() == [(0.9, 0.999)] * 2 and engine.optimizer is optimizer
        engine.set_lr(0.25)
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]

        made = []
        keys = config(scheduler={"type": "WarmupLR", "params": {}})
        net = model()
        engine, *_ = initialize(
            model=net,
            config_params=keys,
            model_parameters=filter(lambda parameter: parameter.dim() == 2, net.parameters()),
            optimizer=lambda found: made.append(len(found)) or torch.optim.SGD(found, lr=1.0, momentum=0.3),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        )
        assert made == [2] and engine.get_lr() == [1.0] and engine.get_mom() == [0.3]

        net = model()
        engine = start(config(), optimizer=torch.optim.SGD(net.parameters(), lr=1.0), net=net)
        run(engine, 1)
        assert engine.get_lr() == [1.0]

        engine = start({"train_batch_size": ROWS})
        engine.eval()
        assert engine(batches(1)[0][0]).shape == (ROWS, 4) and engine.optimizer is None
        with pytest.raises(TrainError, match="deepspeed-optimizer-missing"):
            engine.backward(torch.zeros((), requires_grad=True))

    run_ranks(work, 1)


def test_what_a_script_sees_of_the_engine() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)
            self.kept = "of the model"

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": cross_entropy(self.fc(x), labels), "logits": self.fc(x)}

    def work() -> None:
        engine = start(config(steps_per_print=2, fp16={"enabled": True}), net=Net())
        assert engine.tput_timer.avg_samples_per_sec() == -1.0 and engine.tput_timer.epoch_count == 0
        assert engine.kept == "of the model" and not hasattr(engine, "nothing_like_it")
        assert [name for name, _ in engine.named_parameters()] == ["module.fc.weight", "module.fc.bias"]
        assert (engine.global_rank, engine.local_rank, engine.world_size, engine.mp_world_size) == (0, 0, 1, 1)
        assert (
            engine.device.type == "cpu" and engine.zero_optimization_stage() == 0 and engine.train_batch_size() == ROWS
        )
        assert engine.gradient_clipping() == 0.0 and engine.optimizer_name() == "adam" and engine.dynamic_loss_scale()
        assert engine.train(False) is engine and not engine.module.training and engine.train().module.training
        x, labels = batches(1)[0]
        loss = engine.train(x=x, labels=labels)
        assert loss.dim() == 0
        for _ in range(2):
            engine.backward(engine(x, labels)["loss"])
            engine.step()
        with pytest.raises(TrainError, match="deepspeed-train-batch"):
            engine.train_batch(iter([]))
        with pytest.raises(TrainError, match="deepspeed-train-batch"):
            engine.eval_batch(iter([]))
        state = engine.module_state_dict()
        engine.load_module_state_dict({"module": {name: torch.zeros_like(value) for name, value in state.items()}})
        assert not engine.module.fc.weight.any()

    said: list[str] = []
    run_ranks(work, 1, output=said)
    assert "step=2, skipped=0, lr=[0.01], mom=[(0.9, 0.999)], loss scale=65536" in "".join(said)


def test_the_loader_gives_micro_batches_of_one_order() -> None:
    class Numbers(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 26

        def __getitem__(self, index: int) -> int:
            return index

    def work() -> list:
        keys = config(gradient_accumulation_steps=2, dataloader_drop_last=True)
        double = lambda rows: [2 * row for row in rows]  # noqa: E731
        _, _, loader, _ = initialize(model=model(), config=keys, training_data=Numbers(), collate_fn=double)
        epochs = [list(loader), list(loader)]
        loader.data_sampler.set_epoch(1)
        return [*epochs, list(loader)]

    first, second = run_ranks(work, 2)
    epochs = [[sorted(a + b) for a, b in zip(*pair, strict=True)] for pair in zip(first, second, strict=True)]
    order = torch.randperm(26, generator=torch.Generator().manual_seed(0)).tolist()
    assert epochs[0] == [sorted(2 * row for row in order[at : at + 6]) for at in range(0, 24, 6)]
    # As under DeepSpeed, the order changes only where the script says so.
    assert epochs[0] == epochs[1] != epochs[2]


def test_a_window_that_an_epoch_leaves_open_goes_on_in_the_next() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(18, 8, generator=torch.Generator().manual_seed(4)))

    def work(stage: int) -> dict:
        keys = config(gradient_accumulation_steps=2, zero_optimization={"stage": stage})
        engine, _, loader, _ = initialize(model=model(), config=keys, training_data=data)
        for _ in range(2):
            for (x,) in loader:
                engine.backward(engine(x).square().mean())
                engine.step()
        assert len(loader) == 3 and (engine.micro_steps, engine.global_steps) == (6, 3)
        return copy.deepcopy(engine.module_state_dict())

    weights = [run_ranks(work, 2, args=(stage,))[0] for stage in (0, 2, 3)]
    assert apart(weights[0], weights[1]) < 2e-6 and apart(weights[0], weights[2]) < 2e-6


def test_lines_that_mislead_are_said_once_with_both_numbers() -> None:
    def work() -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage()) if record.levelno >= logging.WARNING else None
        logging.getLogger("paceline").addHandler(handler)
        keys = config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 10}})
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        engine, _, _, scheduler = initialize(model=net, optimizer=optimizer, config=keys)
        rates = []
        for x, y in batches(3):
            engine.backward(cross_entropy(engine(x), y))
            engine.step()
            scheduler.step()
            rates.append(engine.get_lr()[0])
        alone = start(keys)
        for x, y in batches(3):
            alone.backward(cross_entropy(alone(x), y))
            alone.step()
        assert rates[-1] == alone.get_lr()[0] and scheduler.calls == 3 and scheduler.get_last_lr() == [rates[-1]]
        scheduler.step(7)
        assert engine.get_lr()[0] > rates[-1], "a position that is named is the scheduler's own business"
        return said

    first, second = run_ranks(work, 2)
    assert not second
    for parts in (
        ("two optimizers: the script's SGD (lr 0.5) is used, and the config's Adam (lr 0.01",),
        ("a micro-batch of 12 rows was fed to the engine, but a micro-batch is 6", "a step sees 24 samples"),
        ("`lr_scheduler.step()` is left out", "1 optimizer step so far", "with yours there would be 2"),
    ):
        assert sum(all(part in line for part in parts) for line in first) == 1, first


# -- processes -------------------------------------------------------------------------------------------------


def test_a_backend_that_is_not_here_becomes_the_devices_own() -> None:
    def work(backend: str) -> tuple[str, int]:
        import torch.distributed as dist

        init_distributed(dist_backend=backend, timeout=30)
        init_distributed("nccl")  # the group that stands is used
        engine = start(config())
        return dist.get_backend(), engine.world_size

    for backend in ("hccl", "ccl", "gloo"):
        assert run_ranks(work, 2, args=(backend,), group=False) == [("gloo", 2)] * 2


def test_a_group_that_the_script_made_is_used() -> None:
    def work() -> tuple[int, float]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        engine = start(config())
        return dist.get_world_size(), apart(run(engine), plain(0.0))

    for size, difference in run_ranks(work, 2, group=False):
        assert size == 2 and difference < 2e-6


# -- bad input -------------------------------------------------------------------------------------------------


def test_bad_arguments_are_all_told_at_once_before_anything_is_touched() -> None:
    arguments = SimpleNamespace(local_rank=5, deepspeed_config="other.json")
    unit = SimpleNamespace(get_model_parallel_world_size=lambda: 4)
    with pytest.raises(ConfigError) as raised:
        initialize(arguments, None, mpu=unit, config=config())
    codes = [problem.code for problem in raised.value.problems]
    assert codes == ["deepspeed-model", "deepspeed-local-rank", "deepspeed-mpu", "deepspeed-config-source"]
    assert "other.json" in str(raised.value) and "args.local_rank is 5" in str(raised.value)
    for wrong in ({"config": None}, {"config": 3}, {"config": config(), "config_params": config()}):
        with pytest.raises(ConfigError, match="deepspeed-config-source"):
            initialize(model=model(), **wrong)
    parts = {"optimizer": 3, "lr_scheduler": "cosine", "model_parameters": 0.1, "training_data": iter([])}
    with pytest.raises(ConfigError) as raised:
        initialize(model=model(), config=config(), **parts)
    for problem, (name, value) in zip(raised.value.problems, parts.items(), strict=True):
        assert problem.code == "deepspeed-argument"
        assert f"{name} is of type {type(value).__name__}; expected: " in problem.why
    with pytest.raises(RankFailed, match=r"deepspeed-batch-size[\s\S]*multiple of 6, such as 12"):
        run_ranks(_wrong_batch, 2)


def test_a_config_may_come_in_base64() -> None:
    text = base64.urlsafe_b64encode(json.dumps(config()).encode()).decode()
    assert checked(None, model(), None, text, None)["train_batch_size"] == ROWS
    with pytest.raises(ConfigError):
        checked(None, model(), None, "no such file", None)


def _wrong_batch() -> None:
    start({"train_micro_batch_size_per_gpu": 3, "optimizer": ADAM}).set_train_batch_size(11)


def test_two_names_of_one_argument(tmp_path) -> None:
    def work() -> None:
        engine = start(config())
        with pytest.raises(ConfigError, match="deepspeed-alias"):
            engine.save_checkpoint(tmp_path, tag="a", ckpt_id="b")
        run(engine, 1)
        engine.save_checkpoint(tmp_path, ckpt_id=7, client_sd={"step": 1, "epoch": 2})
        path, told = start(config()).load_checkpoint(tmp_path, 7)
        assert path.endswith("7") and told == {"step": 1, "epoch": 2}

    run_ranks(work, 2)


# -- tensor parallel --------------------------------------------------------------------------------------------


def _unit(size: int, number: int) -> SimpleNamespace:
    """A model-parallel unit as Megatron's."""
    return SimpleNamespace(get_model_parallel_world_size=lambda: size, get_model_parallel_rank=lambda: number)


def test_ranks_that_divide_layers_share_their_samples() -> None:
    def work() -> dict:
        rank = dist.get_rank()
        found = {}
        for name, stage, size, named in (
            ("mpu", 1, ROWS, {"mpu": _unit(2, rank)}),
            # Without mpu DeepSpeed counts each rank.
            ("config alone", 0, 2 * ROWS, {}),
        ):
            keys = config(
                train_batch_size=size,
                train_micro_batch_size_per_gpu=ROWS,
                zero_optimization={"stage": stage},
                tensor_parallel={"autotp_size": 2},
            )
            net = tp_model_init(divisible(), 2, torch.float32)
            engine = start(keys, net=net, **named)
            assert engine.accelerator.plan.layout.tp == engine.autotp_size() == 2
            for x, y in batches(3):
                engine.backward(cross_entropy(engine(x), y))
                engine.step()
            found[name] = engine.module_state_dict()
        for size in (0, 1):
            assert start(config(tensor_parallel={"autotp_size": size})).accelerator.plan.layout.tp == 1
        return found

    for ranks in run_ranks(work, 2):
        for name, weights in ranks.items():
            assert apart(weights, plain(0.0)) < 2e-6, name


def test_a_unit_that_is_not_the_plan_is_refused() -> None:
    def work() -> None:
        rank = dist.get_rank()
        divided = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, "tensor_parallel": {"autotp_size": 2}}
        whole = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM}
        for keys, net, unit in (
            (whole, divisible(), _unit(2, rank)),
            (divided, divisible(), _unit(2, 1 - rank)),
            (divided, divisible(), _unit(4, rank)),
            (whole, tp_model_init(divisible(), 2), None),
        ):
            with pytest.raises(ConfigError) as raised:
                start(keys, net=net, mpu=unit)
            assert [problem.code for problem in raised.value.problems] == ["deepspeed-mpu"]

    run_ranks(work, 2)


def test_what_libraries_look_up_in_an_engine() -> None:
    """Names that programs of others read, some of which DeepSpeed itself counts as private."""

    def work() -> None:
        install(["deepspeed"])
        from deepspeed.utils import groups

        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = start({"train_batch_size": ROWS, "zero_optimization": {"stage": 1}}, net=net, optimizer=optimizer)
        assert type(engine.basic_optimizer) is torch.optim.SGD and engine.client_optimizer is optimizer
        assert engine.client_lr_scheduler is None
        assert engine.param_names[engine.module[0].weight] == "0.weight"
        assert apart(engine._consolidated_16bit_state_dict(), engine.module_state_dict()) == 0.0
        settings = engine._config
        assert (settings.train_micro_batch_size_per_gpu, settings.world_size) == (ROWS // 2, 2)
        assert settings.zero_config.stage == 1 and settings.zero_enabled
        engine.set_train_batch_size(2 * ROWS)
        assert settings.gradient_accumulation_steps == 2
        engine.timers("mine").start()
        engine.timers("mine").stop()
        assert engine.timers("mine").elapsed() > 0

        rank = dist.get_rank()
        assert dist.get_world_size(groups._get_data_parallel_group()) == groups._get_data_parallel_world_size() == 2
        assert groups._get_data_parallel_rank() == groups._get_sequence_data_parallel_rank() == rank
        assert groups._get_data_parallel_group_ranks() == [0, 1] and groups._get_broadcast_src_rank() == 0
        assert groups._get_sequence_parallel_world_size() == groups._get_model_parallel_world_size() == 1
        assert groups._get_sequence_parallel_rank() == 0 and groups._get_sequence_parallel_group() is None
        assert dist.get_world_size(groups._get_sequence_data_parallel_group()) == 2
        assert dist.get_world_size(groups._clone_world_group()) == 2
        assert groups.mesh_device is None and groups.expert_tensor_parallel_world_size == 1

    run_ranks(work, 2)
