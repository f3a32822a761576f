"""What a training script meets on several real processes."""

import os

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, CollectiveError, PrepareError, TrainError, testing


def loader(samples=22, batch=4, **options):
    rows = torch.arange(samples)
    return DataLoader(TensorDataset(rows.float().unsqueeze(1), rows), batch, **options)


def test_several_processes_always_form_a_group():
    def work():
        accelerator = Accelerator(cpu=True)
        me = (accelerator.process_index, accelerator.num_processes, accelerator.is_main_process)
        return (*me, dist.get_world_size(), dist.get_rank())

    assert run_ranks(work, world=3) == [(r, 3, r == 0, 3, r) for r in range(3)]


def threads_after_each_run(runs):
    """Trains two models with each of several `Accelerator`s of one process; returns the threads that are left after each."""
    counts = []
    for _ in range(runs):
        accelerator = Accelerator(cpu=True)
        for _ in range(2):
            model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
            model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
            accelerator.backward(model(torch.randn(4, 2)).square().sum())
            optimizer.step()
        accelerator.free_memory()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
@pytest.mark.parametrize("plan", [{}, {"PACELINE_ZERO": "1"}, {"PACELINE_SHARD": "2"}], ids=str)
def test_one_run_after_another_in_a_process_uses_its_groups_again(plan):
    """Each group has threads, sockets and buffers of its own: a process with hundreds of runs had hundreds of them."""
    first, *others = testing.run_ranks(threads_after_each_run, world=2, args=(3,), env=plan)[0]
    assert others == [first] * 2


def test_collectives_after_end_training_say_why_they_fail():
    def work():
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(2, 2))
        accelerator.wait_for_everyone()
        accelerator.end_training()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            accelerator.unwrap_model(model)(torch.ones(1, 3))
        errors = []
        for call in (accelerator.wait_for_everyone, lambda: accelerator.gather(torch.ones(1))):
            with pytest.raises(CollectiveError) as caught:
                call()
            errors.append(str(caught.value).splitlines()[0])
        return errors

    for errors in run_ranks(work, world=2):
        assert errors == [
            "wait_for_everyone cannot run: this process has left its group.  [collective-failed]",
            "gather cannot run: this process has left its group.  [collective-failed]",
        ]


def test_metrics_hold_each_real_sample_once_in_order():
    def work(samples, world_batch, shuffle):
        accelerator = Accelerator(cpu=True, data_seed=5)
        each = accelerator.prepare(loader(samples, world_batch // accelerator.num_processes, shuffle=shuffle))
        seen, counts = [], []
        for x, y in each:
            got = accelerator.gather_for_metrics({"y": y, "x": [x, "text"], "loss": y.float().mean()})
            seen += got["y"].tolist()
            assert got["x"][0].squeeze(1).tolist() == got["y"].tolist()
            counts.append(len(got["loss"]))
        return seen, counts

    for samples in (24, 22, 21, 19):
        ((one, _),) = run_ranks(work, world=1, args=(samples, 6, True))
        assert sorted(one) == list(range(samples))
        for world in (2, 3):
            results = run_ranks(work, world=world, args=(samples, 6, True))
            assert all(seen == one for seen, _ in results)
            tail = samples % 6 or 6
            assert results[0][1][-1] == min(world, tail)  # a loss for each rank with a real sample


def test_what_is_gathered_after_the_loop_holds_no_filler():
    def work():
        accelerator = Accelerator(cpu=True)
        each = accelerator.prepare(loader(9, 4))
        rows = torch.cat([y for _, y in each])
        words = [str(row) for row in rows.tolist()]
        gathered_words = accelerator.gather_for_metrics(words)
        # A list of another length has no row for each sample.
        assert accelerator.gather_for_metrics(["one"]) == ["one"] * 2
        return sorted(accelerator.gather_for_metrics(rows).tolist()), sorted(map(int, gathered_words))

    assert run_ranks(work, world=2) == [(list(range(9)), list(range(9)))] * 2


def test_a_gan_trains_two_models_with_two_optimizers():
    def work(world_batch):
        torch.manual_seed(0)
        maker, judge = nn.Linear(1, 1), nn.Linear(1, 1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (maker, judge)]
        accelerator = Accelerator(cpu=True)
        batch = world_batch // accelerator.num_processes
        judge, o_judge, each, maker, o_maker = accelerator.prepare(
            judge, optimizers[1], loader(22, batch), maker, optimizers[0]
        )
        for _ in range(2):
            for x, _ in each:
                x = x / 22
                o_judge.zero_grad()
                fake = maker(x)
                accelerator.backward((judge(fake.detach()) - judge(x)).mean())
                o_judge.step()
                o_maker.zero_grad()
                accelerator.backward(-judge(maker(x)).mean())
                o_maker.step()
        models = [accelerator.unwrap_model(m) for m in (maker, judge)]
        return [p.tolist() for m in models for p in m.state_dict().values()]

    (one,) = run_ranks(work, world=1, args=(4,))
    for ranks in run_ranks(work, world=2, args=(4,)):
        torch.testing.assert_close(ranks, one, atol=1e-6, rtol=0)


def test_two_accelerators_do_not_touch_each_other():
    def work():
        first, second = Accelerator(gradient_accumulation_steps=4, cpu=True), Accelerator("bf16", cpu=True)
        assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (4, 1)
        assert (first.mixed_precision, second.mixed_precision) == ("no", "bf16")
        a, b = first.prepare(loader(8, 2)), second.prepare(loader(8, 2))
        model = first.prepare(nn.Linear(1, 1))
        with pytest.raises(TrainError):
            first.backward(model(torch.ones(1, 1)).sum())
        next(iter(a))
        return first.run.active_loaders.top is None and second.run.active_loaders.top is None and len(b)

    assert run_ranks(work, world=2) == [2, 2]


@pytest.mark.parametrize(("hook", "tolerance"), [("bf16", 2e-2), ("fp16", 2e-3)])
def test_compressed_gradients_stay_close(hook, tolerance):
    def work(options):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, options=options)
        model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        model, optimizer, each = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader(24, 4))
        for x, _ in each:
            accelerator.backward(model(x / 24).mean())
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    plain = run_ranks(work, world=2, args=({},))[0]
    first, second = run_ranks(work, world=2, args=({"replicate": {"comm_hook": hook}},))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, plain, atol=tolerance, rtol=0)


@pytest.mark.parametrize("wrapper", ["none", "bf16"])
@pytest.mark.parametrize("hook", ["power_sgd", "batched_power_sgd"])
def test_power_sgd_keeps_the_ranks_together(hook, wrapper):
    def work():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, options={"replicate": {"comm_hook": hook, "comm_wrapper": wrapper}})
        model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))
        model, optimizer, each = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader(24, 4))
        losses = []
        for _ in range(4):
            for x, _ in each:
                loss = (model(x / 24) - 1).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        return losses[0] > losses[-1], torch.cat([p.detach().flatten() for p in model.parameters()])

    (down, first), (_, second) = run_ranks(work, world=2)
    assert down and torch.equal(first, second)


def test_batched_power_sgd_with_all_columns_is_the_mean_and_with_one_still_learns():
    def work(columns):
        torch.manual_seed(0)
        options = {"bucket_cap_mb": 1}
        if columns:
            options |= {"comm_hook": "batched_power_sgd", "comm_state": {"matrix_approximation_rank": columns}}
        accelerator = Accelerator(cpu=True, options={"replicate": options})
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = accelerator.prepare(model, optimizer)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(accelerator.process_index))
        losses = []
        for _ in range(40):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    plain_losses, plain = run_ranks(work, world=2, args=(0,))[0]
    # 97 parameters are a square of side 10.
    torch.testing.assert_close(run_ranks(work, world=2, args=(10,))[0][1], plain, atol=1e-5, rtol=0)
    losses, _ = run_ranks(work, world=2, args=(1,))[0]
    assert losses[-1] < 1.2 * plain_losses[-1] < 0.5 * losses[0]


def test_synchronised_batch_norm_runs_on_the_cpu():
    def work(world_batch, convert):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        if convert:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer, each = accelerator.prepare(
            model, optimizer, loader(24, world_batch // accelerator.num_processes)
        )
        for x, y in each:
            accelerator.backward((model(x / 24) - y.unsqueeze(1) / 24).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.unwrap_model(model).state_dict()

    (one,) = run_ranks(work, world=1, args=(8, False))
    (converted,) = run_ranks(work, world=1, args=(8, True))
    for name, value in one.items():
        assert torch.equal(converted[name], value), name
    for state in run_ranks(work, world=2, args=(8, True)):
        for name, value in one.items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_a_frozen_teacher_is_prepared_beside_its_student():
    def work():
        torch.manual_seed(accelerator_rank := int(dist.get_rank()))
        accelerator = Accelerator(cpu=True)
        teacher, student = nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1)
        teacher, student, optimizer = accelerator.prepare(
            teacher, student, torch.optim.SGD(student.parameters(), lr=0.1)
        )
        accelerator.backward((student(torch.ones(1, 1)) - teacher(torch.ones(1, 1))).square().mean())
        optimizer.step()
        del accelerator_rank
        return teacher.weight.item(), accelerator.unwrap_model(student).weight.item()

    first, second = run_ranks(work, world=2)
    assert first == second


@pytest.mark.needs("large")
def test_a_frozen_model_gets_the_first_ranks_values_beside_tensor_parallel_ranks():
    def build(seed):
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)]
        return nn.Sequential(*blocks).requires_grad_(False)

    def work():
        accelerator = Accelerator(cpu=True, plan={"tp": 2, "replicate": 2})
        model = accelerator.prepare(build(seed=accelerator.process_index))
        return accelerator.get_state_dict(model)

    expected = build(seed=0).state_dict()
    for state in run_ranks(work, world=4):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_parameters_left_out_later_are_an_error_on_the_spot():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x, both):
            return self.a(x) + self.b(x) if both else self.a(x)

    def work():
        accelerator = Accelerator(cpu=True)
        model = Fork()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for both in (True, True, False):
            accelerator.backward(model(torch.ones(1, 1), both).sum())
            optimizer.step()
            optimizer.zero_grad()
        return "trained"

    assert run_ranks(work, world=2) == ["trained"] * 2


def test_an_overflow_on_one_rank_skips_the_step_and_the_schedule_on_all():
    def work():
        accelerator = Accelerator("fp16", cpu=True, scaler={"init_scale": 4.0})
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        before = [p.detach().clone() for p in model.parameters()]
        loss = model(torch.ones(1, 1)).sum()
        if accelerator.process_index == 1:
            loss = loss * torch.tensor(1.0).requires_grad_()
            loss.register_hook(lambda g: g * float("inf"))
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return same, accelerator.optimizer_step_was_skipped, schedule.get_last_lr()

    assert run_ranks(work, world=2) == [(True, True, [0.1])] * 2


def test_a_loss_that_is_no_number_stops_every_rank():
    def work():
        accelerator = Accelerator("fp16", cpu=True)
        model = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(torch.ones(1, 1)).sum() * (float("nan") if accelerator.process_index else 1.0)
        accelerator.backward(loss)
        with pytest.raises(TrainError, match=r"\[fp16-loss\]"):
            optimizer.step()
        return True

    assert run_ranks(work, world=2) == [True, True]


def test_an_unprepared_optimizer_is_refused_when_it_steps():
    def work():
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared = accelerator.prepare(model)
        accelerator.backward(prepared(torch.ones(1, 1)).sum())
        with pytest.raises(PrepareError, match=r"\[optimizer-unprepared\]"):
            optimizer.step()
        other = nn.Linear(1, 1)
        free = torch.optim.SGD(other.parameters(), lr=0.1)
        other(torch.ones(1, 1)).sum().backward()
        free.step()
        return True

    assert run_ranks(work, world=2) == [True, True]


def test_a_trigger_on_one_rank_is_seen_by_all():
    def work():
        accelerator = Accelerator(cpu=True)
        if accelerator.is_last_process:
            accelerator.set_trigger()
        return accelerator.check_trigger(), accelerator.check_trigger()

    assert run_ranks(work, world=3) == [(True, False)] * 3


def test_parts_decorators_and_order():
    def work():
        accelerator = Accelerator(cpu=True)
        given = {"a": list(range(5)), "b": torch.arange(5)}
        with accelerator.split_between_processes(given, apply_padding=True) as part:
            padded = (part["a"], part["b"].tolist())
        with accelerator.split_between_processes((1, 2, 3)) as part:
            plain = part
        assert given["a"] == list(range(5))
        order = []
        with accelerator.main_process_first():
            order.append(accelerator.process_index)
        ran = [
            accelerator.on_main_process(lambda: 1)(),
            accelerator.on_last_process(lambda: 1)(),
            accelerator.on_process(lambda: 1, process_index=1)(),
            accelerator.on_local_process(local_process_index=0)(lambda: 1)(),
        ]
        return padded, plain, ran

    first, second = run_ranks(work, world=2)
    assert first == (([0, 1, 2], [0, 1, 2]), (1, 2), [1, None, None, 1])
    assert second == (([3, 4, 4], [3, 4, 4]), (3,), [None, 1, 1, None])


def test_uneven_loops_over_unprepared_loaders_can_join():
    def work():
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with accelerator.join_uneven_inputs([model]):
            for _ in range(3 + accelerator.process_index):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
        return [p.item() for p in model.parameters()]

    first, second = run_ranks(work, world=2)
    assert first == pytest.approx(second)


def test_forward_backward_trains_like_backward():
    def work(at_once):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        model, optimizer, each = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), loader(22, 4))
        loss_fn = lambda out, y: (out.squeeze(1) - y).square().mean()  # noqa: E731
        for x, y in each:
            if at_once:
                accelerator.forward_backward(model, (x, y), loss_fn)
            else:
                accelerator.backward(loss_fn(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return [p.item() for p in model.parameters()]

    assert run_ranks(work, world=2, args=(True,)) == run_ranks(work, world=2, args=(False,))
