"""The options of `tensor`, apart from what is made of them, which a plan without tensor parallelism never loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.kinds import YES_NO
from paceline.plan.options import option


@dataclass(frozen=True)
class TensorOptions:
    """How layers are divided over the `tp` ranks."""

    plan: Mapping[str, str] = option(
        {},
        None,
        "Patterns of layers' names -> colwise, rowwise, colwise_gather, rowwise_split, vocabulary, sequence, partial or "
        "replicated; the first match is used. Empty: the model's own plan, or one derived from names and shapes.",
    )
    sequence: bool = option(
        False, YES_NO, "Divides the layers between attentions and MLPs (norms, dropout) by position."
    )
    loss: bool = option(False, YES_NO, "Logits (a DTensor) and their loss stay divided over the vocabulary.")
    vocabulary: bool = option(True, YES_NO, "A derived plan also divides the token embedding and the head.")
