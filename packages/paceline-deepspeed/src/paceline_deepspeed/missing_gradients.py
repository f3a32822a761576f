"""Gradients of zeros for parameters that the loss did not use.

An optimizer of torch leaves a parameter without a gradient as it is. DeepSpeed gives it a gradient of zeros, so that weight
decay and momentum go on changing it. Scripts that use some of their layers only now and then depend on this.
"""

from __future__ import annotations

import torch
from torch import nn

from paceline.parallel.data.division import dtensor
from paceline.parallel.divided_parameters import part_of
from paceline.world.sharded import is_sharded, local


def fill(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Sets the gradients that are missing to zeros, after the ranks have reduced the others. Does not communicate.

    Args:
        model: whose gradients they are.
        parameters: its parameters, listed once: to walk through the modules costs 15 times as much as to look at the list.
    """
    missing = [parameter for parameter in parameters if parameter.grad is None and parameter.requires_grad]
    if not missing:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # Where no parameter has a gradient there was no backward pass, which the step reports.
    if not gradients:
        return
    divided_gradient = next(filter(is_sharded, gradients), None)
    sparse = _with_sparse_gradients(model)
    for parameter in missing:
        if id(parameter) in sparse:
            continue
        zeros = torch.zeros_like(parameter, requires_grad=False)
        # Stage 2 divides gradients but not parameters. All of its gradients are divided over the same mesh.
        if divided_gradient is not None and not is_sharded(parameter):
            part = part_of(zeros, divided_gradient).to(local(divided_gradient).device)
            zeros = dtensor(part, divided_gradient.device_mesh, parameter.shape)
        parameter.grad = zeros


def _with_sparse_gradients(model: nn.Module) -> set[int]:
    """Collects the ids of embeddings with sparse gradients: their optimizers refuse dense ones."""
    ids: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            ids.add(id(module.weight))
    return ids
