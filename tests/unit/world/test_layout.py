"""Layout: axis sizes and coordinates, by arithmetic."""

import pytest
import torch

from paceline.testing import layouts
from paceline.world.layout import AXES, DATA_AXES, Layout


@pytest.mark.parametrize("size", [1, 2, 6, 8, 12])
def test_ranks_and_coordinates_are_each_others_inverse(size: int) -> None:
    for layout in layouts(size):
        assert layout.size() == size
        assert [layout.rank(layout.coordinate(rank)) for rank in range(size)] == list(range(size))


def test_ranks_are_numbered_as_a_device_mesh_numbers_them() -> None:
    for layout in layouts(12):
        grid = torch.arange(12).view([layout.size(axis) for axis in AXES])
        for rank in range(12):
            assert grid[tuple(layout.coordinate(rank).values())] == rank


def test_peers_along_an_axis() -> None:
    layout = Layout(replicate=2, shard=2, tp=2)
    assert layout.ranks("tp", of=5) == (4, 5)
    assert layout.ranks("shard", of=5) == (5, 7)
    assert layout.ranks("replicate", of=5) == (1, 5)
    assert layout.ranks(*DATA_AXES, of=5) == (1, 3, 5, 7)
    assert layout.ranks(of=5) == (5,)
    assert layout.ranks(*AXES, of=5) == tuple(range(8))


def test_peers_of_a_layout_cover_all_ranks_once() -> None:
    for layout in layouts(8):
        for axis in AXES:
            groups = {layout.ranks(axis, of=rank) for rank in range(8)}
            assert sorted(rank for group in groups for rank in group) == list(range(8))
            assert all(len(group) == layout.size(axis) for group in groups)


def test_width_and_data_index() -> None:
    layout = Layout(pp=2, replicate=2, shard=3, tp=2)
    assert layout.width == 6
    indices = [layout.data_index(rank) for rank in range(layout.size())]
    assert sorted(set(indices)) == list(range(6))
    for rank in range(layout.size()):  # peers along tp and pp read the same samples
        assert {layout.data_index(peer) for peer in layout.ranks("tp", "pp", of=rank)} == {indices[rank]}


def test_a_missing_axis_counts_as_zero() -> None:
    assert Layout(shard=2, tp=3).rank({"tp": 2}) == 2


def test_text() -> None:
    assert str(Layout(replicate=2, tp=4)) == "replicate 2 x tp 4"
    assert str(Layout()) == "one process"
