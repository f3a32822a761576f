"""What we rely on of DistributedDataParallel's private names: a contract a function."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.torch_internals import ddp


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Branches(nn.Module):
    """Two layers, of which the second is used on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.second(self.first(x)) if both else self.first(x)


def test_gradients_that_were_left_out_are_found(group: None) -> None:
    model = DistributedDataParallel(Branches())
    model(torch.ones(2, 4), both=True).sum().backward()
    ddp.check_finished(model)
    model(torch.ones(2, 4), both=False).sum().backward()
    with pytest.raises(RuntimeError, match="finished reduction"):
        ddp.check_finished(model)


def test_buckets_are_as_large_as_the_model_was_told(group: None) -> None:
    mib = 2**18  # elements
    layers = nn.ParameterList(nn.Parameter(torch.zeros(mib)) for _ in range(5))
    own = list(layers)
    # By default the first bucket holds 1 MiB, so that the reduction begins early, and the others 25.
    assert ddp.buckets_of(DistributedDataParallel(layers), own) == [[0], [1, 2, 3, 4]]
    assert ddp.buckets_of(DistributedDataParallel(layers, bucket_cap_mb=2), own) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("final", [False, True])
def test_a_new_reducer_averages_as_the_first_one_did(final: bool, group: None) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches())
    own = list(model.module.parameters())
    model(torch.ones(2, 4), both=True).sum().backward()
    expected = [parameter.grad.clone() for parameter in own]
    model.zero_grad()
    positions = {id(parameter): at for at, parameter in enumerate(reversed(own))}
    ddp.replace_reducer(model, lambda parameter: positions[id(parameter)], final)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 4), both=True).sum().backward()
        ddp.check_finished(model)
    torch.testing.assert_close([parameter.grad for parameter in own], expected)
