"""Programs that are right but out of the ordinary: the same numbers on two processes as on one."""

import math
from copy import deepcopy

import pytest
import torch
from shared_ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, PacelineError


def loader(batch, rows=12):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch // int(torch.distributed.get_world_size()))


def alike(work, *args):
    """Runs `work` on one process and on two; all give the same tensor."""
    (one,) = run_ranks(work, world=1, args=args)
    for each in run_ranks(work, world=2, args=args):
        torch.testing.assert_close(each, one, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [12, 11])
@pytest.mark.parametrize("returned", [torch.Tensor.detach, torch.Tensor.item], ids=["tensor", "number"])
def test_lbfgs_searches_alike_on_every_rank(rows, returned):
    def work():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(4, 1)
        search = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        model, search, batches = accelerator.prepare(model, search, loader(6, rows))
        losses = []
        for x, y in batches:

            def closure(x=x, y=y):
                search.zero_grad()
                loss = (model(x) - y).pow(2).mean()
                accelerator.backward(loss)
                return returned(loss)

            losses.append(torch.as_tensor(search.step(closure)))
        return torch.stack([*losses, model(torch.ones(1, 4)).detach().squeeze()])

    alike(work)


def test_a_line_search_takes_the_steps_of_one_process_that_adds_two_halves_up():
    def losses(accelerator):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        search = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
        if accelerator is not None:
            model, search = accelerator.prepare(model, search)
        x = torch.randn(8, 4).double()
        halves = x.chunk(2)
        if accelerator is not None:
            halves = (halves[accelerator.process_index],)
        calls = 0

        def closure():
            nonlocal calls
            calls += 1
            search.zero_grad()
            total = 0.0
            for half in halves:
                loss = (model(half) - half.sum(1, keepdim=True).sin()).square().mean()
                if accelerator is None:
                    (loss / 2).backward()
                    total += loss.detach() / 2
                else:
                    accelerator.backward(loss)
                    total += loss.detach()
            return total

        # Each iteration enlarges a difference in rounding about ten times, so nothing less than the same bits is enough.
        return [float(search.step(closure)) for _ in range(3)], calls

    assert run_ranks(lambda: losses(Accelerator(cpu=True)), world=2) == [losses(None)] * 2


def test_the_forward_method_is_called_in_place_of_the_model():
    def work():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(4, 1)
        model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(6))
        for x, y in batches:
            accelerator.backward((model.forward(x) - y).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    alike(work)


def test_sparse_gradients():
    def work():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
        first, second = torch.optim.SparseAdam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1)
        words = torch.randint(0, 10, (12, 2), generator=torch.Generator().manual_seed(2))
        model, first, second, batches = accelerator.prepare(
            model, first, second, DataLoader(words, 4 // accelerator.num_processes)
        )
        for rows in batches:
            accelerator.backward(model(rows).pow(2).mean())
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    alike(work)


@pytest.mark.parametrize("plan", [{"replicate": "auto"}, {"shard": "auto"}])
@pytest.mark.parametrize("before", [False, True])
def test_a_model_compiled_after_or_before_prepare_accumulates(before, plan):
    def work():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, plan=plan)
        model = nn.Linear(4, 1)
        if before:
            model = torch.compile(model, backend="eager")
        model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(4))
        compiled = model if before else torch.compile(model, backend="eager")
        for x, y in batches:
            with accelerator.accumulate(compiled):
                accelerator.backward((compiled(x) - y).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
        assert type(accelerator.unwrap_model(compiled, keep_torch_compile=False)) is nn.Linear
        return torch.cat([value.flatten() for value in accelerator.get_state_dict(compiled).values()])

    alike(work)


@pytest.mark.parametrize("plan", [{"shard": "auto", "zero": 2}, {"shard": "auto"}])
def test_a_compiled_model_gets_other_shapes_while_it_has_gradients(plan):
    """It is compiled again while the parameters, which are whole there, have gradients of which each rank has a part."""

    def work():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, plan=plan)
        model = nn.Linear(4, 1)
        model, optimizer, batches = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader(4, 10)
        )
        compiled = torch.compile(model, backend="eager")
        for x, y in batches:
            loss = (compiled(x) - y).pow(2).mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        return torch.cat([value.flatten() for value in accelerator.get_state_dict(compiled).values()])

    alike(work)


def test_an_evaluation_within_training_and_a_loop_that_is_left():
    def work():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(4, 1)
        model, optimizer, train, test = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader(4), loader(4, rows=7)
        )
        for number, (x, y) in enumerate(train):
            accelerator.backward((model(x) - y).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            seen = [accelerator.gather_for_metrics(labels) for _, labels in test]
            assert sum(map(len, seen)) == 7
            for _ in test:
                break
            if number == 1:
                break
        assert accelerator.run.active_loaders.top is None
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    alike(work)


def test_two_loaders_in_one_loop():
    def work():
        accelerator = Accelerator(cpu=True)
        long, short = accelerator.prepare(DataLoader(torch.arange(8), 2), DataLoader(torch.arange(5), 2))
        rows = [[], []]
        for pair in zip(long, short, strict=True):
            for values, batch in zip(rows, pair, strict=True):
                values += accelerator.gather_for_metrics(batch).tolist()
        # In the last pair one rank has no row of the second loader.
        assert rows == [list(range(8)), list(range(5))]
        weight = nn.Linear(1, 1, bias=False)
        trained = accelerator.prepare(weight)
        for values, _ in zip(long, short, strict=True):
            trained.zero_grad()
            accelerator.backward(trained(values[:, None].float()).mean())
        # The first loader's rows count on every rank.
        torch.testing.assert_close(weight.weight.grad, torch.tensor([[5.5]]))

        accelerator = Accelerator(cpu=True, even_batches=True)
        long, short = accelerator.prepare(DataLoader(torch.arange(8), 2), DataLoader(torch.arange(5), 2))
        pairs = zip(long, short, strict=True)
        for batch in next(pairs):
            accelerator.gather_for_metrics(batch)
        first, second = next(pairs)
        assert len(accelerator.gather_for_metrics(first)) == 4  # a batch itself tells from which loader it is
        with pytest.raises(PacelineError, match="data-interleaved"):
            accelerator.gather_for_metrics(second + 1)

    run_ranks(work, world=2)


def test_a_lazy_model():
    def work():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters())
        batches = loader(6)
        if accelerator.num_processes > 1:
            with pytest.raises(PacelineError, match="model-lazy"):
                accelerator.prepare(model, optimizer, batches)
            with torch.no_grad():
                model(torch.zeros(1, 4))
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        if accelerator.num_processes == 1:
            # Before the loop, too, because each iteration over a loader draws a number, as torch's does.
            with torch.no_grad():
                model(torch.zeros(1, 4))
        for x, y in batches:
            accelerator.backward((model(x) - y).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    alike(work)


def test_parameters_that_are_frozen_after_prepare_and_thawed_later():
    def work():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        frozen = list(model[0].parameters())
        model, optimizer, batches = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader(4, rows=12)
        )
        for number, (x, y) in enumerate(batches):
            for parameter in frozen:
                parameter.requires_grad_(number > 0)
            accelerator.backward((model(x) - y).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    alike(work)


def test_two_models_that_share_parameters():
    def work():
        torch.manual_seed(0)
        body, first, second = nn.Linear(4, 3), nn.Linear(3, 1), nn.Linear(3, 1)
        with_first, with_second = nn.Sequential(body, first), nn.Sequential(body, second)
        accelerator = Accelerator(cpu=True)
        if accelerator.num_processes > 1:
            with pytest.raises(PacelineError, match="models-shared"):
                Accelerator(cpu=True, plan={"shard": 2, "zero": 2}).prepare(with_first, with_second)
            hook = {"comm_hook": "bf16"}
            halved = Accelerator(cpu=True, options={"replicate": hook})
            one, other = halved.prepare(*deepcopy((with_first, with_second)))
            for _ in range(2):
                halved.backward(one(torch.ones(2, 4)).sum() + other(torch.ones(2, 4)).sum())
        parameters = [*body.parameters(), *first.parameters(), *second.parameters()]
        with_first, with_second, optimizer, batches = accelerator.prepare(
            with_first, with_second, torch.optim.SGD(parameters, lr=0.1), loader(4)
        )
        for x, y in batches:
            accelerator.backward((with_first(x) - y).pow(2).mean() + (with_second(x) + y).pow(2).mean())
            accelerator.backward((with_first(x) + y).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in parameters])

    alike(work)


# -- divided parameters: the same loop without Paceline runs beside it, in each process ------------------------------------


def whole_values(tensors):
    return [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]


def test_inference_mode_comes_before_training():
    def work():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, plan={"shard": 2})
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        alone = deepcopy(model)
        model = accelerator.prepare(model)
        x = torch.ones(2, 4)
        for _ in range(2):
            with torch.inference_mode():
                torch.testing.assert_close(model(x), alone(x))
            accelerator.backward(model(x).sum())
            alone(x).sum().backward()
        gradients = whole_values(p.grad for p in model.parameters())
        torch.testing.assert_close(gradients, [p.grad for p in alone.parameters()])

    run_ranks(work, world=2)


def test_gradients_of_gradients_through_tensor_parallel_layers():
    def work():
        torch.manual_seed(0)
        table = {"plan": {"0": "colwise", "2": "rowwise"}}
        accelerator = Accelerator(cpu=True, plan={"tp": 2}, options={"tensor": table})
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        alone = deepcopy(model)
        model = accelerator.prepare(model)
        with torch.inference_mode():
            model(torch.ones(1, 4))

        def penalised(network):
            x = torch.arange(8.0).view(2, 4).div(9).requires_grad_()
            output = network(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            return output.pow(2).mean() + slope.pow(2).sum()

        accelerator.backward(penalised(model))
        penalised(alone).backward()
        gradients = whole_values(p.grad for p in model.parameters())
        torch.testing.assert_close(gradients, [p.grad for p in alone.parameters()])

    run_ranks(work, world=2)


def test_muon_steps_divided_matrices_as_one_process_does():
    def work():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, plan={"shard": 2})
        # The last matrix has fewer rows than there are ranks.
        model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False), nn.Linear(3, 1, bias=False))
        alone = deepcopy(model)
        optimizer_alone = torch.optim.Muon(alone.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, torch.optim.Muon(model.parameters(), lr=0.1))
        for number in range(3):
            x = torch.full((2, 4), number + 1.0)
            accelerator.backward(model(x).pow(2).mean())
            alone(x).pow(2).mean().backward()
            for each in (optimizer, optimizer_alone):
                each.step()
                each.zero_grad()
        torch.testing.assert_close(whole_values(model.parameters()), list(alone.parameters()))

    run_ranks(work, world=2)


class SharpnessAware(torch.optim.Optimizer):
    """SAM: the gradient of a step is taken where the loss is higher, at a short distance from the weights."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def climb(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moved"] = parameter.grad.clone()
            parameter.add_(parameter.grad)
        self.zero_grad()

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(self.state[parameter]["moved"]).sub_(parameter.grad, alpha=0.1)


def test_an_optimizer_with_a_second_pass():
    def work():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        alone = deepcopy(model)
        optimizer_alone = SharpnessAware(alone.parameters())
        x = torch.ones(2, 4)
        for update in (optimizer_alone.climb, optimizer_alone.step):
            alone(x).pow(2).mean().backward()
            update()
        for stage in (1, 2, 3):
            accelerator = Accelerator(cpu=True, plan={"shard": 2, "zero": stage})
            trained = deepcopy(model)
            trained, optimizer = accelerator.prepare(trained, SharpnessAware(trained.parameters()))
            accelerator.backward(trained(x).pow(2).mean())
            optimizer.climb()
            accelerator.backward(trained(x).pow(2).mean())
            optimizer.step()
            torch.testing.assert_close(list(trained.parameters()), list(alone.parameters()))

    run_ranks(work, world=2)


def test_lbfgs_resumes_under_tensor_parallelism(tmp_path):
    def losses(done):
        torch.manual_seed(0)
        table = {"0": "colwise", "2": "rowwise"}
        accelerator = Accelerator(cpu=True, plan={"tp": 2}, options={"tensor": {"plan": table}})
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        model, search = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=2))

        def closure():
            search.zero_grad()
            loss = (model(torch.ones(2, 4)) - 1).pow(2).mean()
            accelerator.backward(loss)
            return loss

        if done:
            accelerator.load_state(str(tmp_path))
        for step in range(done, 4):
            if step == 2 and not done:
                accelerator.save_state(str(tmp_path))
            yield search.step(closure).item()

    def work():
        without_break = list(losses(0))
        assert list(losses(2)) == without_break[2:]

    run_ranks(work, world=2)


class InnerSharpnessAware(torch.optim.Optimizer):
    """The common form of SAM, which steps through another optimizer and assigns `.data`."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base = torch.optim.AdamW(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["before"] = parameter.data.clone()
            parameter.add_(parameter.grad, alpha=0.1)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = self.state[parameter]["before"]
        self.base.step()
        self.zero_grad()


def test_an_optimizer_inside_of_another_steps_and_resumes(tmp_path):
    def train(model, optimizer, backward, count):
        x = torch.ones(2, 4)
        for _ in range(count):
            for update in (optimizer.first_step, optimizer.second_step):
                backward(model(x).pow(2).mean())
                update()

    def work():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        alone = deepcopy(model)
        train(alone, InnerSharpnessAware(alone.parameters()), torch.Tensor.backward, 3)
        for number, plan in enumerate(({}, {"shard": 2, "zero": 1}, {"shard": 2})):
            for done, more in ((0, 2), (2, 1)):
                accelerator = Accelerator(cpu=True, plan=plan)
                trained = deepcopy(model)
                trained, optimizer = accelerator.prepare(trained, InnerSharpnessAware(trained.parameters()))
                if done:
                    accelerator.load_state(str(tmp_path / str(number)))
                train(trained, optimizer, accelerator.backward, more)
                accelerator.save_state(str(tmp_path / str(number)))
            state = accelerator.get_state_dict(trained)
            torch.testing.assert_close(state, dict(alone.state_dict()))
            assert accelerator.states.counters.step == 3

    run_ranks(work, world=2)


@pytest.mark.parametrize("plan", [{"shard": 2}, {"pp": 2}], ids=str)
def test_norms_of_every_order_of_divided_gradients(plan):
    def work():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        x = torch.arange(8.0, dtype=torch.float64).view(2, 4) / 9
        loss_alone = model(x).pow(2).mean()
        loss_alone.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norms = {order: torch.nn.utils.get_total_norm(gradients, order) for order in (0.5, 1, 2, 3, math.inf)}
        model.zero_grad()
        accelerator = Accelerator(cpu=True, plan=plan)
        model = accelerator.prepare(model)
        if "pp" in plan:
            loss = accelerator.forward_backward(model, (x, x), lambda output, _: output.pow(2).mean())
            torch.testing.assert_close(loss, loss_alone.detach(), rtol=1e-12, atol=0)
        else:
            accelerator.backward(model(x).pow(2).mean())
        for order, norm in norms.items():
            # float64 all along: the tolerance is far below what float32 can hold.
            got = accelerator.clip_grad_norm_(model.parameters(), math.inf, norm_type=order)
            torch.testing.assert_close(got, norm, rtol=1e-12, atol=0)
        with pytest.raises(PacelineError, match="clip-norm-type"):
            accelerator.clip_grad_norm_(model.parameters(), math.inf, norm_type=0)
        before = [parameter.grad.clone() for parameter in model.parameters()]
        accelerator.clip_grad_norm_(model.parameters(), math.inf, error_if_nonfinite=True)
        if accelerator.is_last_process:
            next(parameter.grad for parameter in model.parameters()).fill_(math.nan)
        with pytest.raises(PacelineError, match="clip-nonfinite"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        *_, last_before = before
        *_, last = model.parameters()
        assert bool((last.grad == last_before).all())

    run_ranks(work, world=2)
