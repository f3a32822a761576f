"""Layout: axis sizes and coordinates, by arithmetic."""

import dataclasses

import pytest
import torch

from paceline.testing import layouts
from paceline.world.layout import AXES, DATA_AXES, GRADIENT_AXES, Layout, given_axes, listed_axes, model_axes


@pytest.mark.parametrize("size", [1, 2, 6, 8, 12])
def test_ranks_are_numbered_as_a_device_mesh_numbers_them(size: int) -> None:
    for layout in layouts(size):
        assert layout.size() == size
        grid = torch.arange(size).view([layout.size(axis) for axis in AXES])
        for rank in range(size):
            assert list(layout.coordinate(rank)) == list(AXES)
            assert grid[tuple(layout.coordinate(rank).values())] == rank


def test_width_and_data_index() -> None:
    layout = Layout(pp=2, replicate=2, shard=3, tp=2)
    assert layout.width == 6
    indices = [layout.data_index(rank) for rank in range(layout.size())]
    assert sorted(set(indices)) == list(range(6))
    by_data_coordinate: dict[tuple[int, ...], set[int]] = {}
    for rank in range(layout.size()):
        coordinate = layout.coordinate(rank)
        by_data_coordinate.setdefault(tuple(coordinate[axis] for axis in DATA_AXES), set()).add(indices[rank])
    # Peers along tp and pp read the same samples.
    assert all(len(shares) == 1 for shares in by_data_coordinate.values())


def test_what_ranks_along_an_axis_share() -> None:
    # They decide who averages gradients with whom, who reads which samples, and where the rest of the ranks goes.
    assert list(AXES) == ["pp", "replicate", "shard", "cp", "ep", "tp"]
    assert DATA_AXES == ("replicate", "shard", "ep")
    assert GRADIENT_AXES == ("replicate", "shard", "cp", "ep")
    assert [axis.name for axis in AXES.values() if axis.divides_parameters] == ["pp", "ep", "tp"]
    assert {axis.name: axis.default for axis in AXES.values()} == {
        "pp": 1, "replicate": "auto", "shard": "auto", "cp": 1, "ep": 1, "tp": 1
    }  # fmt: skip
    assert model_axes() == ["tp", "cp", "pp"]
    assert [axis.name for axis in listed_axes()] == ["replicate", "shard", "ep", "tp", "cp", "pp"]
    assert given_axes() == ["tp", "ep", "cp", "pp"]


def test_sizes() -> None:
    layout = Layout(pp=2, tp=3)
    assert layout.sizes() == {"pp": 2, "replicate": 1, "shard": 1, "cp": 1, "ep": 1, "tp": 3}
    assert (layout.cp, layout.tp, layout.parameter_parts, layout.size("tp", "cp")) == (1, 3, 6, 3)
    # A size that is no layout yet, such as 0, is kept: whoever checks a plan names it.
    assert Layout(shard=0).sizes()["shard"] == 0
    assert layout == Layout(tp=3, pp=2, shard=1) and hash(layout) == hash(Layout(tp=3, pp=2)) and layout != Layout(tp=3)


def test_a_rank_outside_of_all_others_stands_at_0() -> None:
    assert Layout().coordinate(0) == dict.fromkeys(AXES, 0)
    assert Layout().data_index(0) == 0


def test_an_axis_that_there_is_not() -> None:
    with pytest.raises(TypeError, match="dp"):
        Layout(dp=2)
    with pytest.raises(AttributeError, match="dp"):
        Layout().dp  # noqa: B018


def test_nobody_changes_one() -> None:
    for thing, name in ((Layout(tp=2), "tp"), (AXES["tp"], "default")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, name, 4)


def test_text() -> None:
    assert repr(Layout(tp=4, replicate=2)) == "Layout(replicate=2, tp=4)"
    assert str(Layout(replicate=2, tp=4)) == "replicate 2 x tp 4"
    assert str(Layout()) == "one process"
