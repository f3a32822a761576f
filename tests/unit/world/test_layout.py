"""Layout: axis sizes and coordinates, by arithmetic."""

import pytest
import torch

from paceline.testing import layouts
from paceline.world.layout import AXES, DATA_AXES, Layout


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


def test_text() -> None:
    assert str(Layout(replicate=2, tp=4)) == "replicate 2 x tp 4"
    assert str(Layout()) == "one process"
