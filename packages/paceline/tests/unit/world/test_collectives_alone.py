"""Collectives in a world of one: the same answers as at any width, and no group."""

from dataclasses import dataclass

import pytest
import torch

from paceline.base.errors import CollectiveError
from paceline.world.arrived import RowCounts
from paceline.world.collectives import Collectives
from paceline.world.form import Forms
from paceline.world.world import World


@pytest.fixture
def alone() -> Collectives:
    return Collectives(World(), device=torch.device("cpu"), debug=True)


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


def test_gather_gives_copies_without_gradient(alone) -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    output = alone.gather(Output(weight * 2, weight.sum()))
    assert torch.equal(output.logits, torch.full((2, 3), 2.0)) and output.loss.shape == (1,)
    assert not output.logits.requires_grad
    copy = alone.gather(weight)
    copy += 1
    assert weight.sum() == 6


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.uint8, torch.int16]
)
def test_every_dtype(alone, dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    assert torch.equal(alone.gather(tensor.T), tensor.T)
    assert alone.gather(tensor).dtype == dtype


def test_views_and_lazy_conjugates(alone) -> None:
    complex_ = torch.tensor([1 + 2j, 3 - 1j])
    assert torch.equal(alone.gather(complex_.conj()), complex_.conj().resolve_conj())
    assert torch.equal(alone.gather(complex_.conj().imag), -complex_.imag)
    assert torch.equal(alone.gather(torch.arange(10)[::3]), torch.arange(10)[::3])
    assert alone.gather(torch.ones(1, 3).expand(4, 3)).shape == (4, 3)


def test_empty(alone) -> None:
    assert alone.gather([]) == []
    assert alone.gather(torch.empty(0, 3)).shape == (0, 3)


def test_inference_mode(alone) -> None:
    with torch.inference_mode():
        inside = alone.gather(torch.ones(2))
    assert torch.equal(alone.gather(inside), torch.ones(2))


def rows(real: int, loaded: int):
    """Counts of a batch with so many real rows."""
    return lambda _: RowCounts((real,), (loaded,))


def test_rows_drop_filler(alone) -> None:
    pred, target, loss = torch.arange(8).view(4, 2), torch.arange(4), torch.tensor(0.5)
    found = alone.gather_rows({"p": (pred, target), "l": loss, "stats": torch.ones(3)}, rows(3, 4))
    assert torch.equal(found["p"][0], pred[:3]) and torch.equal(found["p"][1], target[:3])
    assert torch.equal(found["l"], torch.tensor([0.5])) and found["stats"].shape == (3,)


def test_rows_of_other_objects(alone) -> None:
    found = alone.gather_rows({"text": ["a", "b"], "x": torch.ones(2), "n": 3, "none": None}, rows(1, 2))
    assert found["text"] == ["a"] and found["x"].shape == (1,) and found["n"] == [3] and found["none"] == [None]
    boxes = [{"box": torch.ones(k, 4)} for k in range(3)]
    assert len(alone.gather_rows(boxes, rows(2, 3), objects=True)) == 2


def test_a_rank_without_a_real_row_adds_nothing(alone) -> None:
    found = alone.gather_rows((torch.ones(1, 2), torch.tensor(1.0), "s"), rows(0, 1))
    assert found[0].shape == (0, 2) and found[1].shape == (0,) and found[2] == []


def test_reduce(alone) -> None:
    mean = alone.reduce([torch.tensor([True, False]), torch.tensor(3), torch.tensor(2.0)], "mean")
    assert [one.dtype for one in mean] == [torch.float32] * 3
    assert alone.reduce(torch.tensor(3.0), "sum", scale=2.0) == 6
    assert alone.reduce(torch.tensor(3), "none", scale=0.5) == 1.5
    assert alone.reduce(torch.tensor(3)).dtype == torch.int64
    with pytest.raises(CollectiveError, match="'median'") as caught:
        alone.reduce(torch.tensor(3), "median")
    assert caught.value.code == "collective-reduction"


def test_the_rest(alone) -> None:
    assert alone.broadcast({"x": torch.ones(2)})["x"].sum() == 2
    assert alone.broadcast_object("x") == "x"
    assert alone.gather_object(print) == [print]
    assert alone.pad_across(torch.ones(2, 3), dim=1).shape == (2, 3)
    assert alone.any(True) and not alone.any(False)
    assert alone.sum_ints([3, 4]) == [3, 4]
    alone.barrier()
    alone.check("backward")


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        ("text", "is a str"),
        (None, "is a NoneType"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, device="meta"), "on meta"),
    ],
)
def test_leaves_that_cannot_be_sent_are_named(alone, leaf, said) -> None:
    with pytest.raises(CollectiveError, match="gather_object") as caught:
        alone.gather({"fine": torch.ones(1), "outer": [torch.ones(1), leaf]})
    assert caught.value.code == "collective-leaf"
    assert caught.value.problems[0].why[0].startswith("outer[1]") and said in str(caught.value)


def test_objects_that_cannot_be_sent(alone) -> None:
    with pytest.raises(CollectiveError, match="pickle says") as caught:
        alone.gather_rows([lambda: 1], rows(1, 1))
    assert caught.value.code == "collective-object"


def test_forms_are_told_apart_by_all_that_matters() -> None:
    forms = Forms(torch.device("cpu"))

    def topic(tree, exact=False):
        return forms.of("gather", tree, exact)[1].topic.fingerprint

    base = topic({"a": torch.ones(2, 3)})
    assert base == topic({"a": torch.ones(5, 3)})
    others = [
        topic({"b": torch.ones(2, 3)}),
        topic({"a": torch.ones(2, 4)}),
        topic({"a": torch.ones(2, 3, 1)}),
        topic({"a": torch.ones(2, 3).double()}),
        topic({"a": [torch.ones(2, 3)]}),
        topic([torch.ones(2, 3)]),
        topic({"a": torch.ones(2, 3)}, exact=True),
        topic({"a": torch.ones(5, 3)}, exact=True),
        forms.of("reduce", {"a": torch.ones(2, 3)})[1].topic.fingerprint,
    ]
    assert len({base, *others}) == len(others) + 1
    assert topic(torch.tensor(1.0)) != topic(torch.ones(1))


def test_a_form_is_worked_out_once() -> None:
    forms = Forms(torch.device("cpu"))
    first = forms.of("gather", (torch.ones(2), torch.ones(3)))[1]
    assert forms.of("gather", (torch.ones(7), torch.ones(1)))[1] is first
    assert first.topic.detail == "(_, _) of float32[*], float32[*]"
