"""Nested batches keep their shape, whatever they are made of."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.world import tree

Pair = namedtuple("Pair", "left right")


@dataclass
class Sample:
    image: Tensor
    name: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Tensor

    def __post_init__(self) -> None:
        assert not isinstance(self.value, str), "the constructor must not run again"


class Strict(dict):
    """A dict whose constructor takes something else."""

    def __init__(self, size: int) -> None:
        super().__init__(size=torch.tensor(size))
        self.note = "kept"


def one() -> Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    "make",
    [
        one,
        lambda: (one(), one()),
        lambda: [one(), [one()]],
        lambda: {"a": one(), "b": {"c": one()}},
        lambda: Pair(one(), (one(),)),
        lambda: OrderedDict(b=one(), a=one()),
        lambda: defaultdict(list, {"a": one()}),
        lambda: UserDict({"a": one()}),
        lambda: MappingProxyType({"a": one()}),
        lambda: Sample(one(), "cat", {"k": one()}),
        lambda: Frozen(one()),
        lambda: torch.ones(2, 2).max(0),
        lambda: (),
        dict,
    ],
)
def test_every_container_comes_back_as_what_it_was(make) -> None:
    before = make()
    leaves, structure = tree.leaves(before), before
    after = tree.unflatten(structure, [leaf + 1 if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    assert type(after) is type(before)
    assert tree.structure(after) == tree.structure(before)
    for old, new in zip(tree.tensors(before), tree.tensors(after), strict=True):
        assert torch.equal(new, old + 1)


def test_the_original_is_untouched() -> None:
    sample = Sample(one(), "cat", {"k": one()})
    moved = tree.map_tensors(lambda tensor: tensor * 0, sample)
    assert torch.equal(sample.image, one()) and torch.equal(sample.extra["k"], one())
    assert moved.name == "cat"


def test_a_subclass_keeps_its_attributes_and_runs_no_constructor() -> None:
    moved = tree.map_tensors(lambda tensor: tensor + 1, Strict(3))
    assert moved["size"] == 4 and moved.note == "kept"
    assert tree.map_leaves(str, Frozen(one())).value.startswith("tensor")
    assert isinstance(tree.map_tensors(lambda t: t, defaultdict(list, a=one())).default_factory(), list)


def test_leaves_in_order_with_what_is_no_tensor() -> None:
    batch = {"text": ["a", None], "n": 3, "x": (torch.tensor(1), b"raw")}
    leaves = tree.leaves(batch)
    assert leaves[:3] == ["a", None, 3] and leaves[4] == b"raw"
    assert [path for path, _ in tree.walk(batch)] == ["text[0]", "text[1]", "n", "x[0]", "x[1]"]
    assert [path for path, _ in tree.walk([{"a": {"b": 1}}])] == ["[0].a.b"]


def test_first_rows() -> None:
    assert tree.first_rows({"loss": torch.tensor(1.0), "x": torch.ones(5, 2)}) == 5
    assert tree.first_rows(["a", 1]) is None


def test_descriptions() -> None:
    batch = {"x": torch.ones(2, 3), "y": [torch.tensor(1), "s"], "p": Pair(one(), 1)}
    assert tree.describe(batch) == "{x: float32[2, 3], y: [int64[], str], p: Pair(left: float32[2], right: int)}"
    assert tree.structure(batch) == "{x: _, y: [_, str], p: Pair(left: _, right: int)}"


def test_to_device_moves_tensors_and_asks_objects_that_can_move_themselves() -> None:
    class Graph:
        moved: torch.device | None = None

        def to(self, device: torch.device) -> "Graph":
            self.moved = device
            return self

    moved = tree.to_device({"x": one(), "g": Graph(), "s": "text"}, "meta")
    assert moved["x"].device.type == "meta"
    assert moved["g"].moved == torch.device("meta")
    assert moved["s"] == "text"


def test_to_device_copies_nothing_that_is_there() -> None:
    tensor = one()
    assert tree.to_device([tensor], "cpu")[0] is tensor


def test_all_on_is_whether_to_device_has_nothing_to_do() -> None:
    cpu = torch.device("cpu")
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert tree.all_on({"x": [torch.ones(2)], "names": ("a", None), "any": object()}, cpu)
    assert not tree.all_on((torch.ones(2), {"x": torch.ones(2, device="meta")}), cpu)
    assert not tree.all_on((packed,), torch.device("meta"))


def test_packed_sequences_keep_their_lengths_on_the_cpu() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    moved = tree.to_device((packed,), "meta")[0]
    assert moved.data.device.type == "meta" and moved.batch_sizes.device.type == "cpu"


def test_outputs_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.SequenceClassifierOutput(loss=torch.tensor(1.0), logits=torch.ones(2, 3))
    moved = tree.map_tensors(lambda tensor: tensor * 2, output)
    assert type(moved) is type(output) and list(moved) == ["loss", "logits"]
    assert moved.loss == 2 and moved["logits"].sum() == 12 and moved[0] == 2
    assert output.loss == 1
    encoding = transformers.BatchEncoding({"input_ids": torch.ones(2, 3), "n": [1]})
    moved = tree.to_device(encoding, "meta")
    assert type(moved) is type(encoding) and moved["input_ids"].device.type == "meta"
    assert encoding["input_ids"].device.type == "cpu"
