"""Layers and losses in parts give what they give as a whole. DeepSpeed's own gave these values too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline import ConfigError
from paceline_deepspeed.tiling import TiledFusedLogitsLoss, TiledLinear, TiledMLP, sequence_tiled_compute


def gradients(output: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output.square().sum(), tensors))


@pytest.mark.parametrize("shape", [(2, 10, 4), (9, 4)])
def test_an_mlp_in_parts_of_a_sequence(shape: tuple[int, ...]) -> None:
    mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(shape, requires_grad=True)
    tiled = TiledMLP.apply(lambda module, part: module(part), mlp, x, 3, list(mlp.parameters()))
    whole = mlp(x)
    torch.testing.assert_close(tiled, whole)
    torch.testing.assert_close(gradients(tiled, x, *mlp.parameters()), gradients(whole, x, *mlp.parameters()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_in_parts_of_a_sequence(reduction: str) -> None:
    head = nn.Linear(4, 7).double()
    x = torch.randn(2, 12, 4, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 7, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.float64)

    def of_rows(module: nn.Module, rows: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        loss = cross_entropy(module(rows), labels, reduction=reduction)
        return loss if mask is None else loss * mask.mean()

    def of_names(x: Tensor, y: Tensor, weight: float) -> Tensor:
        return weight * cross_entropy(head(x).flatten(0, 1), y.flatten(), reduction=reduction)

    whole = cross_entropy(head(x).flatten(0, 1), y.flatten(), reduction=reduction)
    expected = gradients(whole, x, head.weight)
    named = {"x": x, "y": y}
    for tiled in (
        TiledFusedLogitsLoss.apply(of_rows, head, x, y, None, 4, [head.weight], reduction),
        TiledFusedLogitsLoss.apply(of_rows, head, x, y, mask, 3, [head.weight], reduction),
        sequence_tiled_compute(of_names, 12, 4, named, {"weight": 1.0}, "x", [head.weight], 0, reduction),
    ):
        torch.testing.assert_close(tiled, whole)
        torch.testing.assert_close(gradients(tiled, x, head.weight), expected)
    for keywords in ({"mask": mask[:1], "output_reduction": reduction}, {"mask": None, "output_reduction": "none"}):
        with pytest.raises(ConfigError, match="deepspeed-tiles"):
            TiledFusedLogitsLoss.apply(of_rows, head, x, y, shards=2, **keywords)


def test_a_linear_layer_of_tiles() -> None:
    for sizes, splits in (((8, 6), (2, 3)), ((7, 5), (3, 2)), ((4, 4), (1, 1))):
        layer = nn.Linear(*sizes)
        tiled = TiledLinear(*sizes, in_splits=splits[0], out_splits=splits[1], init_linear=layer)
        x = torch.randn(3, sizes[0], requires_grad=True)
        torch.testing.assert_close(tiled(x), layer(x))
        torch.testing.assert_close(gradients(tiled(x), x), gradients(layer(x), x))
        tiled.combine_out_splits = False
        assert len(tiled(x)) == splits[1]
    assert list(TiledLinear(4, 4, in_splits=2).state_dict()) == [
        "linears.0.0.weight",
        "linears.0.1.weight",
        "linears.0.1.bias",
    ]
    with pytest.raises(ConfigError, match="deepspeed-tiles"):
        TiledLinear(4, 4, in_splits=5)
