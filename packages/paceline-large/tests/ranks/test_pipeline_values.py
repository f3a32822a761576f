"""Pipelines: what the code around the blocks may do with hidden states, and that nothing else is computed from placeholders."""

import pytest
import torch
from shared_ranks import run_ranks
from torch import nn

from paceline import Accelerator, PlanError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """A first layer whose output has the shape of its input, so that nothing about a shape says what is a placeholder."""

    block = Block

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.full((4,), 0.7))

    def forward(self, x):
        x = first = self.stem(x)
        kept = self.keep(first)
        for block in self.blocks:
            x = self.step(block, x)
        return self.end(self.head(x), kept)

    def stem(self, x):
        return self.first(x)

    def keep(self, first):
        return None

    def step(self, block, x):
        return block(x)

    def end(self, output, kept):
        return output


class Residual(Model):
    def step(self, block, x):
        return x + block(x)


class Keywords(Model):
    def step(self, block, x):
        return x + block(x=x)


class InPlace(Model):
    def step(self, block, x):
        y = block(x)
        y += x
        return y


class Scaled(Model):
    """Parameters of the model itself compute with the hidden state before and after the blocks."""

    def stem(self, x):
        return self.first(x) * self.scale

    def step(self, block, x):
        y = block(x)
        return self.scale * x + y


class Transposed(Model):
    def stem(self, x):
        return self.first(x).t().contiguous().t()

    def step(self, block, x):
        return x + block(x)


class Shapes(Model):
    """Takes shapes, dtypes and devices from what an earlier stage computed."""

    def keep(self, first):
        x = first
        return torch.ones_like(x[:, :1]) + torch.zeros(1).to(x).expand(len(x), 1) + x.new_ones(1).type_as(x)

    def end(self, output, kept):
        return output * kept


class RouterBlock(Block):
    def forward(self, x):
        y = super().forward(x)
        return x + y, y.square().mean()


class Handed(Block):
    def forward(self, both):
        x, total = both
        y = super().forward(x)
        return x + y, total + y.square().mean()


class HandsLossOn(Model):
    """A loss of each block is handed on in the first argument, as the error for `SumsLosses` says."""

    block = Handed

    def forward(self, x):
        both = self.first(x), torch.zeros(())
        for block in self.blocks:
            both = block(both)
        return self.head(both[0]), both[1]


RUN = (Residual, Keywords, InPlace, Scaled, Transposed, Shapes, HandsLossOn)


class Added(Model):
    def keep(self, first):
        return first.sum(-1, keepdim=True)

    def end(self, output, kept):
        return output + kept


class WithoutNaN(Added):
    def keep(self, first):
        return first.nan_to_num().sum(-1, keepdim=True)


class Compared(Added):
    def keep(self, first):
        return first.data.abs().sum(-1, keepdim=True) > 0.5


class Largest(Added):
    def keep(self, first):
        return first.argmax(-1, keepdim=True)


class WrittenInto(Added):
    def keep(self, first):
        kept = torch.zeros(len(first), 1, dtype=first.dtype)
        kept[:, 0] = first.nan_to_num()[:, 0]
        return kept


class Decides(Added):
    def keep(self, first):
        return 1 if first.sum() > 0 else 2


class ReadsLists(Added):
    def keep(self, first):
        return 1 if first.abs().sum().tolist() > 0 else 2


class ReadsArrays(Added):
    def keep(self, first):
        return 1 if first.detach().numpy().sum() > -1e9 else 2


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)

    def forward(self, x):
        return self.gate(x).argmax(-1, keepdim=True)


class Integers(Added):
    """A module before the blocks puts out integers, which cannot be NaN."""

    def __init__(self):
        super().__init__()
        self._modules = {"router": Router(), **self._modules}

    def stem(self, x):
        self.chosen = self.router(x)
        return self.first(x)

    def keep(self, first):
        return self.chosen


class SumsLosses(Model):
    block = RouterBlock

    def forward(self, x):
        x, total = self.first(x), 0.0
        for block in self.blocks:
            x, own = block(x)
            total = total + own
        return self.head(x), total


class BeforeTheBlock(Model):
    def step(self, block, x):
        return x * self.scale + block(x)


REFUSED = (
    Added, WithoutNaN, Compared, Largest, WrittenInto, Decides, ReadsLists, ReadsArrays, Integers, SumsLosses, BeforeTheBlock,
)  # fmt: skip


def loss_of(output, target):
    if isinstance(output, tuple):
        return nn.functional.mse_loss(output[0], target) + output[1]
    return nn.functional.mse_loss(output, target)


def train(kind, plan, keep=()):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, plan=plan, options={"pipeline": {"keep": list(keep)}} if keep else None)
    model = kind().double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    x = torch.randn(8, 4, dtype=torch.float64)
    batch = (x, x.sum(1, keepdim=True))
    numbers = []
    for _ in range(3):
        numbers.append(accelerator.forward_backward(model, batch, loss_of).item())
        numbers.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    for _ in range(2):
        with torch.no_grad():
            output = model(x)
        if isinstance(output, tuple):
            output = output[0]
        numbers.append(float(output.sum()))
    return numbers


def hooked(plan, is_compiled=False):
    """Hooks that are no linear functions see the gradient of each batch of a window."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, plan=plan, gradient_accumulation_steps=2)
    model = Residual().double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    if is_compiled:
        model = torch.compile(model, backend="eager")  # which the stages are called beside
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    layout = accelerator.plan.layout
    own = slice(layout.data_index(accelerator.process_index), None, layout.width)
    for x in torch.randn(4, 8, 4, dtype=torch.float64):
        with accelerator.accumulate(model):
            accelerator.forward_backward(model, (x[own], x[own].sum(1, keepdim=True)), loss_of)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        model(x)
    return [value for entry in accelerator.get_state_dict(model).values() for value in entry.flatten().tolist()]


def test_hooks_on_gradients_see_whole_batches():
    want = run_ranks(hooked, world=1, args=({},))[0]
    for plan in ({}, {"replicate": 2}, {"shard": 2}):
        is_compiled = not plan  # it takes a second in each process
        for got in run_ranks(hooked, world=2 * (1 + len(plan)), args=({"pp": 2, **plan}, is_compiled)):
            assert got == pytest.approx(want, rel=1e-9, abs=1e-12), plan


def train_all(kinds, plan, keep=()):
    results = []
    for kind in kinds:
        try:
            results.append(train(kind, plan, keep))
        except PlanError as error:
            results.append(error.code)
    return results


@pytest.mark.parametrize("plan", [{"pp": 2}, {"pp": 2, "tp": 2}])
def test_hidden_states_are_used_around_the_blocks(plan):
    want = run_ranks(train_all, world=1, args=(RUN, {}))[0]
    size = 2 * plan.get("tp", 1)
    for found in run_ranks(train_all, world=size, args=(RUN, plan)):
        for kind, got, numbers in zip(RUN, found, want, strict=True):
            assert got == pytest.approx(numbers, rel=1e-9, abs=1e-12), kind


def test_nothing_else_is_computed_from_placeholders():
    for found in run_ranks(train_all, world=2, args=(REFUSED, {"pp": 2})):
        assert dict(zip(REFUSED, found, strict=True)) == dict.fromkeys(REFUSED, "pipeline-skip")


def test_what_the_error_says_works():
    kinds = (Added, Compared, Decides)
    want = run_ranks(train_all, world=1, args=(kinds, {}))[0]
    for found in run_ranks(train_all, world=2, args=(kinds, {"pp": 2}, ("first",))):
        for kind, got, numbers in zip(kinds, found, want, strict=True):
            if kind is Decides:  # decides by its micro-batch
                continue
            assert got == pytest.approx(numbers, rel=1e-9, abs=1e-12), kind


class Tiny(nn.Module):
    """An embedding, two blocks and a head, which may be tied."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 12, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words):
        hidden = self.table(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def add_block(model):
    model.blocks.append(nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double())
    return model.blocks[2].parameters()


def set_weight(model):
    model.head.weight = nn.Parameter(torch.randn(12, 6).double())
    return [model.head.weight]


def set_head(model):
    model.head = nn.Linear(6, 12, bias=False).double()
    return model.head.parameters()


def set_block(model):
    model.blocks[1] = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).double()
    return model.blocks[1].parameters()


def changed_later(change, tied, plan, at=1, schedule=None):
    """Trains, changes the model, and trains on, at last with fewer rows: the state, or the code of what is raised."""
    torch.manual_seed(0)
    options = {"pipeline": {"schedule": schedule}} if schedule else None
    accelerator = Accelerator(cpu=True, plan=plan, options=options)
    model = Tiny(tied).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    try:
        for step, rows in enumerate((12, 12, 8)):
            words = torch.arange(rows)
            if step == at:
                torch.manual_seed(1)
                optimizer.add_param_group({"params": list(change(accelerator.unwrap_model(model)))})
            accelerator.forward_backward(model, (words, words.flip(0)), nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
    except PlanError as error:
        return error.code
    return accelerator.get_state_dict(model)


def test_what_is_changed_after_prepare_is_followed_or_refused_on_all_ranks():
    followed = (set_head, set_block)
    refused = [(add_block, False), (set_weight, False), (set_weight, True)]

    def work():
        states = []
        for schedule in ("1f1b", "zero-bubble"):
            states += [changed_later(change, False, {"pp": 2}, schedule=schedule) for change in followed]
        codes = [changed_later(change, tied, {"pp": 2}) for change, tied in refused]
        return states, [*codes, changed_later(add_block, False, {"pp": 2}, at=0)]

    want = [changed_later(change, False, None) for change in followed]
    for states, codes in run_ranks(work, 2):
        torch.testing.assert_close(states, want * 2, atol=1e-12, rtol=0)
        assert codes == ["pipeline-changed"] * 4


def summed_targets(output, target):
    """The loss of targets of which each sample has a list or a dict of its own, as the boxes of an image."""
    values = [sum(float(box["area"].sum()) for box in boxes) + len(text) for boxes, text in zip(*target, strict=True)]
    return (output.squeeze(-1) - torch.tensor(values)).square().mean()


def losses_of_lists(plan):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, plan=plan)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    losses = []
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 4, generator=generator)
        boxes = [[{"area": torch.randn(3, generator=generator)}] * count for count in range(4)]
        losses.append(float(accelerator.forward_backward(model, (x, (boxes, ["a", "bb", "", "dddd"])), summed_targets)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()
    return losses


def test_lists_with_an_entry_for_each_sample_are_divided():
    (expected,) = run_ranks(losses_of_lists, 1, args=({},))
    for losses in run_ranks(losses_of_lists, 2, args=({"pp": 2},)):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_random_numbers_in_full_parameters_are_refused_and_can_be_loaded():
    def work():
        accelerator = Accelerator(cpu=True, plan={"pp": 2})
        torch.manual_seed(0)
        model, spare = Residual(), Residual()
        model = accelerator.prepare(model)
        with accelerator.full_parameters(model, writeback=True):
            for parameter in model.parameters():
                nn.init.constant_(parameter, 0.5)

        def draw(models):
            torch.manual_seed(3)
            for parameter in models.parameters():
                nn.init.normal_(parameter)

        with pytest.raises(PlanError) as caught, accelerator.full_parameters(model, writeback=True):
            # Only one rank has the head, but all ranks are told.
            draw(nn.ModuleList(module for name, module in model.named_modules() if name.endswith("head")))
        draw(spare)
        model.load_state_dict(spare.state_dict())
        state = accelerator.get_state_dict(model)
        return caught.value.code, all(torch.equal(state[name], value) for name, value in spare.state_dict().items())

    assert run_ranks(work, 2) == [("pipeline-draws", True)] * 2
