"""Parameters that are in no module, such as the temperature of SAC or the weights of several losses.

Each process computes a gradient of them from its own samples. So they need the same average as those of a model: they become
the parameters of a module that is prepared beside the models. A plan that divides parameters would put others in their place,
of which the script's own loss knows nothing. So every process keeps them whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from paceline.torch_internals.modules import as_parameter


class LooseParameters(nn.Module):
    """Holds the tensors themselves, which the script's loss is computed from."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            self.register_parameter(f"parameter{number}", as_parameter(tensor))
