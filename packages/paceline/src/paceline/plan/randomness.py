"""What the plan says of layers that differ from those of one process: their masks are other ones at another number of ranks,
or they change buffers, or are called with weights, by the samples of their own rank. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from paceline.base.parts import how_to_install
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Decision, Plan
from paceline.world.layout import GRADIENT_AXES

_MOST_NAMES = 3  # more names that differ in numbers alone are shown as one pattern


def known_before(plan: Plan, facts: ModelFacts, strategies: Iterable[str]) -> list[Decision]:
    """Names each layer of a model that says of itself that it is random, and a loss that no strategy makes that of the batch.

    Args:
        plan: of the run.
        facts: those of the model.
        strategies: that the plan uses.
    """
    decisions = []
    if facts.random_layers:
        decisions.append(decision(facts.name, facts.random_layers))
    balances = facts.balanced or facts.auxiliary_loss
    if balances and plan.layout.size(*GRADIENT_AXES) > 1 and "balance" not in strategies:
        reason = (
            "the loss that balances experts is a product of two means over tokens, which each rank takes over its own: the "
            f"mean over ranks is another number than on one process; {how_to_install('large')}"
        )
        decisions.append(Decision(f"balance({facts.name})", "of each rank", "derived", reason=reason))
    return decisions


def of_first_pass(
    plan: Plan, facts: ModelFacts, drew: Iterable[str], buffers: Iterable[str], tensors: Sequence[str]
) -> list[Decision]:
    """Says what the first pass has shown of modules that did not say it of themselves.

    Args:
        plan: of the run.
        facts: those of the model.
        drew: names of the modules that drew random numbers.
        buffers: names of the modules that changed buffers of their own.
        tensors: names of attributes that are no buffers, and were changed.
    """
    kinds = dict(facts.modules)
    decisions = []
    known_draws = dict(facts.random_layers)
    unknown_draws = [(name, kinds.get(name, "module")) for name in drew if name not in known_draws]
    if unknown_draws:
        decisions.append(decision(facts.name, unknown_draws, "seen in the first pass"))
    # Those that are synchronised have a decision already. Spectral norms change theirs by the weight alone.
    known_changes = {*facts.batch_norms, *(name for name, _ in facts.batch_layers)}
    unknown_changes = []
    for name in buffers:
        kind = kinds.get(name, "module")
        if name not in known_changes and kind != "_SpectralNorm":
            unknown_changes.append((name, kind))
    if unknown_changes:
        options = [plan.options.get(name, {}) for name in plan.strategies]
        are_sent = all(chosen.get("broadcast_buffers", True) for chosen in options)
        decisions.append(changed_buffers(facts.name, unknown_changes, are_sent))
    if tensors:
        decisions.append(changed_tensors(facts.name, tensors))
    return decisions


def decision(model: str, layers: Iterable[tuple[str, str]], seen: str = "") -> Decision:
    """What these layers mean for the numbers of a run on several ranks.

    Args:
        model: name of its class.
        layers: name and kind of each.
        seen: how they were found, where they do not say so themselves.
    """
    reason = (
        "these layers draw random numbers, each rank for its own part of the batch: with them, losses differ from those of "
        "one process, and at every number of ranks; in evaluation they are the same"
    )
    return Decision(f"random_layers({model})", _shown(layers), "derived", seen, reason)


def changed_buffers(model: str, layers: Iterable[tuple[str, str]], are_sent: bool) -> Decision:
    """What the plan says of layers that were seen to change buffers of their own in the first pass.

    Args:
        model: name of its class.
        layers: name and kind of each.
        are_sent: whether rank 0 sends its buffers to the other ranks.
    """
    reason = "these layers change buffers in the forward pass. Each rank keeps its own, by its part of the batch"
    if are_sent:
        reason = (
            "these layers change buffers in the forward pass. Every rank takes those of rank 0 before its next step: what "
            "depends on the samples follows rank 0's part of the batch, and not the whole batch as on one process"
        )
    return Decision(f"buffers({model})", _shown(layers), "derived", "seen in the first pass", reason)


def changed_tensors(model: str, attributes: Iterable[str]) -> Decision:
    """What the plan says of tensors that are attributes of modules but no buffers, and that the first pass has changed."""
    reason = (
        "the forward pass changes these tensors, which are neither buffers nor parameters. Each rank keeps its own, by its "
        "part of the batch, and no checkpoint holds them. Buffers (`register_buffer`) follow rank 0 and are saved"
    )
    return Decision(f"attributes({model})", ", ".join(attributes), "derived", "seen in the first pass", reason)


def adapted_weights(model: str) -> Decision:
    """What the plan says of a model that was called with other tensors than its parameters, as MAML's inner steps do."""
    reason = (
        "the model ran with other tensors than its parameters (`torch.func.functional_call`). Where they come from gradients "
        "of a batch, `torch.autograd.grad` gives each rank those of its own part, and one process those of the whole batch: "
        "take `accelerator.gather(gradient[None], with_gradient=True).mean(0)`. Where every sample is a task of its own, "
        "nothing differs"
    )
    return Decision(f"adapted_weights({model})", "each rank's own", "derived", "seen in a forward pass", reason)


def _shown(layers: Iterable[tuple[str, str]]) -> str:
    """Every name with its kind; those that differ in numbers alone as one pattern where they are many."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, kind in layers:
        # Replaces each part of the name that is a number: neither before nor after it is there anything but a dot.
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        groups.setdefault((pattern, kind), []).append(name)
    texts = []
    for (_, kind), names in groups.items():
        if len(names) > _MOST_NAMES:
            texts.append(f"{len(names)} of {_common_pattern(names)} ({kind})")
        else:
            texts += [f"{name or 'the model itself'} ({kind})" for name in names]
    return ", ".join(texts)


def _common_pattern(names: Iterable[str]) -> str:
    """One name for several of equally many parts: `layers.*.dropout`, with a star only where they differ."""
    parts_of_names = [name.split(".") for name in names]
    pattern = []
    for parts in zip(*parts_of_names, strict=True):
        pattern.append(parts[0] if len(set(parts)) == 1 else "*")
    return ".".join(pattern)
