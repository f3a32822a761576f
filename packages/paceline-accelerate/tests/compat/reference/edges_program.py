"""The part of `state_program` that asks about odd values: what is at the edge of the documentation."""

import collections
import io
import os
import tempfile
from pathlib import Path

import torch
from accelerate import PartialState, utils
from accelerate.utils import environment, imports, other
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

Pair = collections.namedtuple("Pair", "a b")


class Packed(collections.UserDict):
    """A tokenizer's batch: it moves its tensors itself."""

    def to(self, device, **options):
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


class OldMove:
    """A method `to` that knows no `non_blocking`."""

    def to(self, device):
        return ["moved", str(device)]


def ones(*shape):
    return torch.ones(*shape)


def batches():
    """Nested batches."""
    two = [{"a": ones(1), "b": torch.zeros(1)}, {"b": torch.zeros(2), "a": ones(2)}]
    return {
        "joined by key": lambda: utils.concatenate(two),
        "joined, a key lacks": lambda: utils.concatenate([{"a": ones(1)}, {"b": ones(1)}]),
        "joined, more entries": lambda: utils.concatenate([[ones(1)], [ones(1), ones(2)]]),
        "joined, fewer entries": lambda: utils.concatenate([[ones(1), ones(1)], [ones(1)]]),
        "joined, named": lambda: utils.concatenate([Pair(ones(1), ones(1)), Pair(ones(1), ones(2))]),
        "joined, nothing": lambda: utils.concatenate([]),
        "joined, texts": lambda: utils.concatenate(["a", "b"]),
        "joined along 1": lambda: utils.concatenate([[ones(1, 2)], [ones(1, 1)]], dim=1),
        "type kept": lambda: utils.honor_type(Pair(1, 2), iter([3, 4])),
        "type kept, too few": lambda: utils.honor_type(Pair(1, 2), iter([1])),
        "type of a number": lambda: utils.honor_type(3, iter([1])),
        "moved itself": lambda: utils.send_to_device(Packed(a=ones(1)), "meta"),
        "moved the old way": lambda: utils.send_to_device(OldMove(), "cpu", non_blocking=True),
        "moved but for": lambda: utils.send_to_device({"a": ones(1), "b": {"a": ones(1)}}, "meta", skip_keys="a"),
        "applied": lambda: utils.recursively_apply(str.upper, {"a": "x"}, test_type=lambda leaf: isinstance(leaf, str)),
        "applied to other": lambda: utils.recursively_apply(torch.neg, {"a": 3}, error_on_other_type=True),
        "sizes": lambda: [utils.ignorant_find_batch_size([[], ones(2)]), utils.find_batch_size(ones(3, 2))],
        "size of nothing": lambda: utils.find_batch_size({}),
        "size of a scalar": lambda: utils.find_batch_size(torch.tensor(1)),
        "lists": lambda: utils.listify({"a": ones(2).bfloat16(), "b": torch.tensor(3)}),
        "moved nowhere": lambda: utils.send_to_device(ones(1), "nowhere"),
    }


def between_processes():
    """Operations between processes."""
    rank = PartialState().process_index

    def gradient(reduction):
        value = torch.ones(2, requires_grad=True)
        reduced = utils.reduce(value * 3, reduction)
        if not reduced.requires_grad:
            return None
        reduced.sum().backward()
        return [reduced.detach(), value.grad]

    def padded_gradient():
        value = torch.ones(rank + 1, requires_grad=True)
        utils.pad_across_processes(value * 3).sum().backward()
        return value.grad

    def same_when_padded():
        value = ones(2)
        return utils.pad_across_processes(value) is value

    def parts(inputs, **options):
        with PartialState().split_between_processes(inputs, **options) as part:
            return part

    def order():
        lines = []
        with PartialState().main_process_first():
            lines.append(rank)
        return lines

    questions = {
        "mean has a gradient": lambda: gradient("mean"),
        "sum has a gradient": lambda: gradient("sum"),
        "padding has a gradient": padded_gradient,
        "padding of equal rows": same_when_padded,
        "padded first": lambda: utils.pad_across_processes(ones(rank + 1, 2), pad_index=9, pad_first=True),
        "padded along the last": lambda: utils.pad_across_processes(ones(2, rank + 1), dim=-1),
        "padded along none": lambda: utils.pad_across_processes(ones(rank + 1), dim=7),
        "gathered, no gradient": lambda: utils.gather(torch.ones(1, requires_grad=True) * 2).requires_grad,
        "gathered objects of a tuple": lambda: list(utils.gather_object((rank,))),
        "gathered texts": lambda: utils.gather_object("ab"),
        "broadcast is the same object": lambda: same_after(lambda value: utils.broadcast(value), ones(1)),
        "list is the same object": lambda: same_after(lambda value: utils.broadcast_object_list(value), [rank]),
        "order": order,
        "a padded list": lambda: parts([1, 2, 3, 4, 5], apply_padding=True),
        "a padded tensor": lambda: parts(torch.arange(5), apply_padding=True),
        "a text is for all": lambda: parts("abc"),
        "a set is for all": lambda: parts({1}),
    }
    if PartialState().num_processes > 1:
        questions["a number has no parts"] = lambda: parts(5)
        questions["a number in a dict has no parts"] = lambda: parts({"a": 1})
    return questions


def same_after(operation, value):
    return operation(value) is value


def words():
    """Texts, variables, sizes."""

    def variable(text, read):
        os.environ["EDGE"] = text
        try:
            return read()
        finally:
            del os.environ["EDGE"]

    def patched():
        os.environ["EDGE"] = "old"
        try:
            with utils.patch_environment(edge=1):
                raise ValueError("leaves the block")
        except ValueError:
            return os.environ.pop("EDGE")

    questions = {
        f"truth of {text!r}": lambda text=text: utils.str_to_bool(text)
        for text in ("yes", "Y", "t", "TRUE", "on", "1", "no", "F", "off", "0", "", " yes ", "2", "maybe")
    }
    for text in ("1", "no", "", "junk"):
        questions[f"flag {text!r}"] = lambda text=text: variable(text, lambda: utils.parse_flag_from_env("EDGE"))
    for text in ("12", "-3", "", "1.5"):
        read = lambda: environment.get_int_from_env(["NO_EDGE", "EDGE"], 7)  # noqa: E731
        questions[f"number {text!r}"] = lambda text=text, read=read: variable(text, read)
    for size in (0, 1023, 1536, 5 * 1024**3, 3 * 1024**4, 3 * 1024**5, 2.5):
        questions[f"{size} bytes"] = lambda size=size: utils.convert_bytes(size)
    return questions | {
        "patched after an error": patched,
        "merged into": lambda: utils.merge_dicts({"b": {"c": 1}}, {"b": {"d": 2}, "e": 3}),
        "merged over a value": lambda: utils.merge_dicts({"b": {"c": 3}}, {"b": 1}),
        "distributed is there": imports.is_torch_distributed_available,
        "recipe of TransformerEngine": utils.TERecipeKwargs,
        "bar": lambda: utils.tqdm(range(3), file=io.StringIO()).disable,
        "bar of a truth value": lambda: utils.tqdm(True, range(3)),
    }


def files():
    """Small files; each process has a folder of its own."""
    folder = Path(tempfile.mkdtemp())
    file = io.BytesIO()

    def written(value, name, **options):
        utils.save(value, folder / name, save_on_each_node=True, **options)
        if PartialState().is_local_main_process:
            return sorted(entry.name for entry in folder.iterdir())
        return None

    def through_memory():
        torch.save({"a": ones(1)}, file)
        file.seek(0)
        return other.load(file)

    questions = {
        "missing": lambda: other.load(folder / "missing.bin"),
        "in memory": through_memory,
        "plain": lambda: written({"a": 3}, "a.bin"),
    }
    if PartialState().is_local_main_process:
        questions["no tensor"] = lambda: written({"a": 3}, "a.safetensors", safe_serialization=True)
        questions["no dictionary"] = lambda: written([ones(1)], "a.safetensors", safe_serialization=True)
    return questions


def loops():
    """Loops on the processes that there are."""

    def accelerator(**options):
        from state_program import made

        return made(**options)

    def two_models():
        own = accelerator(gradient_accumulation_steps=2)
        models = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
        prepared = own.prepare(*models)
        seen = []
        for number in range(4):
            with own.accumulate(*prepared):
                values = torch.full((1, 1), float(own.process_index + number))
                own.backward(sum(model(values) for model in prepared).sum())
                seen.append([own.sync_gradients, *[model.weight.grad.item() for model in models]])
        return seen

    def reduced_loss():
        own = accelerator()
        model = nn.Linear(1, 1, bias=False)
        prepared = own.prepare(model)
        loss = prepared(torch.full((1, 1), float(own.process_index + 1))).sum()
        own.backward(own.reduce(loss, "mean"))
        return model.weight.grad

    def nested_loaders():
        own = accelerator()
        outer, inner = own.prepare(DataLoader(range(4), batch_size=1), DataLoader(range(6), batch_size=2))
        seen = []
        for _ in outer:
            seen.append(own.gradient_state.end_of_dataloader)
            seen += [own.gradient_state.end_of_dataloader for _ in inner]
        return seen

    def told_epochs():
        class Numbers(Dataset):
            def __init__(self):
                self.told = []

            def __len__(self):
                return 4

            def __getitem__(self, index):
                return torch.tensor(index)

            def set_epoch(self, epoch):
                self.told.append(epoch)

        numbers = Numbers()
        loader = accelerator().prepare(DataLoader(numbers))
        loader.set_epoch(3)
        seen = [list(numbers.told)]
        for _ in range(2):
            seen.append([batch.tolist() for batch in loader])
        return [*seen, numbers.told]

    def step_of_a_window():
        own = accelerator(gradient_accumulation_steps=3)
        model = nn.Linear(2, 1)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        rows = TensorDataset(torch.arange(26.0).view(13, 2) / 10)
        model, optimizer, loader = own.prepare(
            model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(rows, batch_size=2)
        )
        for (batch,) in loader:
            with own.accumulate(model):
                own.backward(model(batch).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
        return own.unwrap_model(model).weight

    return {
        "two models": two_models,
        "a reduced loss": reduced_loss,
        "a loader in a loader": nested_loaders,
        "a dataset hears of the epoch": told_epochs,
        "a window that ends early": step_of_a_window,
        "a class for a handler": lambda: accelerator(kwargs_handlers=[utils.AutocastKwargs]),
    }


def everything():
    """Answers by topic and question."""
    from state_program import answer, made

    found = {}
    for topic in (batches, between_processes, words, files, loops):
        made()
        found[f"edges, {topic.__name__}"] = {name: answer(question) for name, question in topic().items()}
    return found
