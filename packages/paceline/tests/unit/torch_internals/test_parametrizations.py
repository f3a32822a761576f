"""Every tool of torch's that replaces a parameter is seen before it does so."""

import pytest
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from paceline.torch_internals.parametrizations import before_replacing

SEEN = []
TOOLS = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "prune globally": lambda layer: prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, amount=1),
    "spectral_norm": spectral_norm,
    "weight_norm": weight_norm,
    "parametrizations.spectral_norm": parametrizations.spectral_norm,
    "parametrizations.orthogonal": parametrizations.orthogonal,
    "register_parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_is_seen_before_it_replaces_a_parameter(tool) -> None:
    before_replacing(SEEN.append)
    SEEN.clear()
    layer = nn.Linear(3, 2)
    weight = layer.weight
    TOOLS[tool](layer)
    assert SEEN[0] is weight or tool == "prune globally"
