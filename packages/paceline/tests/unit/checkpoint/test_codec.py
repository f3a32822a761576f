"""States as JSON and tensors: every value comes back as it was, or is refused by name."""

import json
import math
from collections import Counter, OrderedDict

import numpy
import pytest
import torch

from paceline.base.errors import CheckpointError
from paceline.checkpoint.state.codec import Encoder, decode, references


def back(value):
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, "root"))
    assert not encoder.problems
    return decode(json.loads(text), encoder.tensors)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 0.1, math.inf, "text", [1, [2]], (1, (2,)), {"a": {"b": 1}}, {1: "x", (2, 3): "y"},
        {"$tensor": 1}, {1, 2}, frozenset({3}), b"\x00\xff", 1 + 2j, torch.float16, torch.device("cpu"),
        torch.Size([2, 3]), Counter({30: 1}), OrderedDict(b=1, a=2), 2**70, {"nested": [({"k": (1,)},)]},
    ],
)  # fmt: skip
def test_comes_back(value) -> None:
    found = back(value)
    assert found == value
    assert type(found) is type(value)


def test_nan_comes_back() -> None:
    assert math.isnan(back(math.nan))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "uint8", "uint32", "bool"])
def test_arrays_come_back(dtype) -> None:
    value = numpy.arange(6).reshape(2, 3).astype(dtype)
    found = back({"array": value, "number": value[1, 2]})
    assert (found["array"] == value).all() and found["array"].dtype == value.dtype
    assert found["number"] == value[1, 2] and found["number"].dtype == value.dtype


def test_tensors_are_named_by_their_place() -> None:
    encoder = Encoder()
    tree = encoder.encode({"a": torch.ones(2), "b": [torch.zeros(1)]}, "custom/x")
    assert list(encoder.tensors) == ["custom/x/a", "custom/x/b/0"] == list(references(tree))


def test_equal_places_do_not_collide() -> None:
    found = back({"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    assert found["a/b"].item() == 1 and found["a"]["b"].item() == 0


class Own:
    pass


@pytest.mark.parametrize("value", [Own(), lambda: 1, torch.eye(2).to_sparse(), numpy.array(["text"]), object])
def test_refused_by_name(value) -> None:
    encoder = Encoder()
    encoder.encode({"fine": 1, "inner": [value]}, "custom/mine")
    (problem,) = encoder.problems
    assert problem.code == "checkpoint-value"
    assert problem.what.startswith("custom/mine/inner/0 is a ")


def test_unknown_tag() -> None:
    with pytest.raises(CheckpointError) as error:
        decode({"$import": "os"}, {})
    assert error.value.code == "checkpoint-damaged"


class Halves(torch.Tensor):
    """A tensor whose values are in another one, as those of 8-bit optimizer states."""

    @staticmethod
    def __new__(cls, codes, factor):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, factor):
        self.codes, self.factor = codes, factor

    def __tensor_flatten__(self):
        return ["codes"], [self.factor]

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["codes"], *context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


def test_a_tensor_that_is_made_of_others_comes_back_if_its_class_is_known_as_safe() -> None:
    halves = Halves(torch.tensor([1, 2], dtype=torch.uint8), 0.5)
    refusing = Encoder()
    refusing.encode(halves, "x")
    assert [problem.code for problem in refusing.problems] == ["checkpoint-value"]
    encoder = Encoder()
    with torch.serialization.safe_globals([Halves]):
        encoded = json.loads(json.dumps(encoder.encode({"state": halves}, "x")))
        back = decode(encoded, encoder.tensors)["state"]
    assert not encoder.problems and list(encoder.tensors) == list(references(encoded)) == ["x/state/codes"]
    assert type(back) is Halves and back.factor == 0.5 and back.shape == (2,) and torch.equal(back.codes, halves.codes)
    with pytest.raises(CheckpointError) as caught:  # as where the library was not imported
        decode(encoded, encoder.tensors)
    assert caught.value.code == "checkpoint-subclass"
