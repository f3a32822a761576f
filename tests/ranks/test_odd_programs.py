"""Programs that are right but out of the ordinary: the same numbers on two processes as on one."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, PacelineError
from paceline.testing import run_ranks


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
def test_lbfgs_searches_alike_on_every_rank(rows):
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
                return loss

            losses.append(search.step(closure).detach())
        return torch.stack([*losses, model(torch.ones(1, 4)).detach().squeeze()])

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


def test_a_model_compiled_after_prepare_accumulates():
    def work():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Linear(4, 1)
        model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(4))
        compiled = torch.compile(model, backend="eager")
        for x, y in batches:
            with accelerator.accumulate(compiled):
                accelerator.backward((compiled(x) - y).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
        assert type(accelerator.unwrap_model(compiled)) is nn.Linear
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
        for x, y in batches:
            accelerator.backward((model(x) - y).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    alike(work)
