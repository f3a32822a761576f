"""Which layers tensor parallelism divides, and how: pure, from the facts of a model.

`divide` uses the first of these that there is:

    the user's table   options={"tensor": {"plan": {"*.q_proj": "colwise", "*.o_proj": "rowwise"}}}
    the model's own    what transformers' models say of themselves (`tp_plan`)
    derived            by names and shapes inside the repeated blocks; see `names`

Then it groups the layers that compute together, divides the vocabulary, and collects the problems.

Source: Shoeybi et al., "Megatron-LM", 2019 (colwise and rowwise pairs, vocabulary); Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022 (sequence).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from re import sub
from typing import Any

from paceline.base.errors import Problem
from paceline.plan.facts import Layer, ModelFacts
from paceline.plan.fqn import inside, listed, parent, within, within_some
from paceline_large.tensor.names import LayerGroup, derive, examined, is_linear, shape
from paceline_large.tensor.options import TensorOptions

# style -> roles of the layers that it is for
STYLES = {
    "colwise": ("linear", "conv1d"),
    "rowwise": ("linear", "conv1d"),
    "colwise_gather": ("linear", "conv1d"),
    "rowwise_split": ("linear", "conv1d"),
    "vocabulary": ("embedding",),
    "sequence": ("norm",),
    "partial": ("norm",),
    "replicated": ("linear", "conv1d", "embedding", "norm", "attention", "computed"),
}
DIVIDED = ("colwise", "rowwise", "colwise_gather", "rowwise_split", "vocabulary")
# Key and value projections with fewer heads than there are ranks, see `_shared`. No plan can ask for it.
SHARED = "shared_heads"
# what transformers' models call them
OWN_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "rowwise_rep": "rowwise_split",
    "rowwise_split_input": "rowwise_split",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "partial",
    "replicate": "replicated",
    "replicated": "replicated",
    "sequence_parallel": "replicated",
    # These are for stacked experts, which stay whole: `ep` divides them.
    "packed_colwise": "replicated",
    "packed_rowwise": "replicated",
    "moe_tp_experts": "replicated",
}
# The layer of a latent attention whose output all heads read: one part of its gradient is whole on each rank, the other is not.
_LATENT = "mla_kv_a_proj"
_EXAMPLE = 'options={"tensor": {"plan": {"*.fc1": "colwise", "*.fc2": "rowwise"}}}'


@dataclass(frozen=True)
class LayerDivision:
    """How the layers of a model are divided.

    Attributes:
        source: "table", "model" or "derived".
        styles: FQN of a layer -> its style.
        groups: layers that compute together.
        whole: FQN -> why it is left whole, or why what lies behind it is computed whole.
        head: FQN of the layer that puts out logits; "" where it is not divided.
        problems: what makes it impossible.
    """

    source: str
    styles: dict[str, str] = field(default_factory=dict)
    groups: tuple[LayerGroup, ...] = ()
    whole: dict[str, str] = field(default_factory=dict)
    head: str = ""
    problems: tuple[Problem, ...] = ()


def divide(facts: ModelFacts, width: int, options: TensorOptions) -> LayerDivision:
    """Decides for each layer of a model. Pure.

    Args:
        facts: of the model.
        width: tensor-parallel ranks.
        options: of the strategy.
    """
    if not isinstance(options.plan, Mapping):
        why = f"options.tensor.plan is a {type(options.plan).__name__}; expected: a mapping of patterns to styles"
        return LayerDivision("table", problems=(Problem("tensor-style", "this is no plan.", why=why, fix=_EXAMPLE),))
    table = tuple((str(pattern), str(style)) for pattern, style in options.plan.items())
    return _divide(facts, width, table, options.sequence, options.loss, options.vocabulary)


@lru_cache(maxsize=16)
def _divide(
    facts: ModelFacts, width: int, table: tuple[tuple[str, str], ...], sequence: bool, loss: bool, vocabulary: bool
) -> LayerDivision:
    layers = {layer.name: layer for layer in facts.layers}
    problems: list[Problem] = []
    whole: dict[str, str] = {}
    if table or facts.tensor_plan:
        if table:
            source = "table"
            rules = table
        else:
            source = "model"
            rules = _own_rules(facts, whole)
        problems += _unknown_styles(rules, source, facts)
        styles = _matched(rules, facts, source, problems)
        groups = _grouped(styles, facts, source, problems)
    else:
        source = "derived"
        derived = derive(facts)
        groups = derived.groups
        whole |= derived.whole
        styles = _styles_of(groups)

    indivisible: list[Problem] = []
    for group in groups:
        indivisible += _indivisible(group, layers, width)
        for name in _shared(group, layers, width):
            styles[name] = SHARED
            whole[name] = f"key-value heads: {group.kv_heads} for {width} ranks; each computes the one of its queries"
        if group.reason:
            whole[group.module] = group.reason
    problems += _alike(indivisible)

    # Vocabulary comes before ties: an embedding that shares its weight with a head must be divided as the head is.
    divides_vocabulary = source == "derived" and vocabulary
    if divides_vocabulary:
        _vocabulary(facts, styles, whole, width)
    untied = _tie(facts, layers, styles)
    if divides_vocabulary and untied:
        # Nobody asked for the vocabulary by name, so a model whose head cannot be divided is divided without it.
        alone = _divide(facts, width, table, sequence, loss, False)
        reason = "the head shares a parameter with a module that is whole"
        return replace(alone, whole={**alone.whole, "embedding and head": reason})
    problems += untied
    problems += _indivisible_vocabulary(layers, styles, whole, width, source)
    divided = [name for name, style in styles.items() if style in DIVIDED]
    for row in facts.experts:
        if not any(within(name, row.name) for name in divided):
            whole[row.name] = (
                "experts: ranks along tp hold the same ones and compute the same tokens; ep divides experts"
            )

    # A `colwise_gather` layer outside of the blocks puts out logits; one inside of a block begins a group that is not split.
    head = ""
    for name, style in styles.items():
        if style == "colwise_gather" and not _block_of(name, facts):
            head = name
    division = LayerDivision(source, styles, tuple(groups), whole, head)
    problems += _requests(division, facts, sequence, loss, table)
    return replace(division, problems=tuple(problems))


def _styles_of(groups: Iterable[LayerGroup]) -> dict[str, str]:
    """Styles of the layers of derived groups."""
    styles: dict[str, str] = {}
    for group in groups:
        if group.split:
            first_style = "colwise"
            last_style = "rowwise"
        else:
            # What lies between the layers needs all features, so they are gathered and split again.
            first_style = "colwise_gather"
            last_style = "rowwise_split"
        styles |= dict.fromkeys(group.first, first_style)
        styles[group.last] = last_style
        styles |= dict.fromkeys(group.partial, "partial")
    return styles


def _block_of(name: str, facts: ModelFacts) -> str:
    """FQN of the repeated block that a module is or is in; "" where there is none."""
    for block in facts.blocks:
        if within(name, block):
            return block
    return ""


# -- a table, the user's or the model's ---------------------------------------------------------------------------


def _own_rules(facts: ModelFacts, whole: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns the model's own plan in our styles, without attentions that are left whole, which `whole` gets."""
    latent = {parent(pattern) for pattern, style in facts.tensor_plan if style == _LATENT}
    for module in latent:
        whole[module] = "all heads read the latents and the rotary keys that one layer computes"
    # An unknown style keeps its name, for the error.
    return tuple(
        (pattern, OWN_STYLES.get(style, style)) for pattern, style in facts.tensor_plan if parent(pattern) not in latent
    )


def _unknown_styles(rules: Iterable[tuple[str, Any]], source: str, facts: ModelFacts) -> list[Problem]:
    if source == "table":
        place = "options.tensor.plan"
        styles = tuple(STYLES)
        fix = "use one of these"
    else:
        place = f"the own plan of {facts.name}"
        styles = tuple(OWN_STYLES)
        fix = f"write a plan of your own: {_EXAMPLE}"
    problems = []
    for pattern, style in rules:
        if style in STYLES:
            continue
        problems.append(
            Problem(
                "tensor-style",
                f"there is no way of dividing a layer called {style!r}.",
                why=f"{place} says so for {pattern!r}; known: {', '.join(styles)}",
                fix=fix,
            )
        )
    return problems


def _matched(
    rules: Iterable[tuple[str, str]], facts: ModelFacts, source: str, problems: list[Problem]
) -> dict[str, str]:
    """Style of each layer that a pattern matches; the first pattern counts."""
    styles: dict[str, str] = {}
    places = [layer for layer in facts.layers if layer.role]
    for pattern, style in rules:
        matching = [layer for layer in places if fnmatchcase(layer.name, pattern)]
        fitting = [layer for layer in matching if layer.role in STYLES.get(style, ())]
        for layer in fitting:
            styles.setdefault(layer.name, style)
        # An unknown style is a problem already, and a model's own plan speaks of layers that this size of it may lack.
        if fitting or style not in STYLES or source == "model":
            continue
        # What `tensor-nothing` advises. Layers without a role, such as convolutions, are left whole anyway.
        if (pattern, style) == ("*", "replicated"):
            continue
        fix = "patterns are full names with * for any text, such as '*.fc1'; see `model.named_modules()`"
        if matching and matching[0].role == "computed":
            reason = f"the weight of {matching[0].name} is computed from other parameters, as by `weight_norm`"
            fix = "take it out of the plan, with the layers that are divided together with it"
        elif matching:
            reason = f"{matching[0].name} is a {matching[0].kind}"
        else:
            reason = f"{len(places)} layers have other names"
            names = [layer.name for layer in places]
            near = get_close_matches(pattern, names, 1, 0.3)
            if near:
                reason += f", such as {near[0]}"
        problems.append(
            Problem(
                "tensor-pattern",
                f"the pattern {pattern!r} matches no layer of {facts.name} that can be {style}.",
                why=f"options.tensor.plan; {reason}",
                fix=fix,
            )
        )
    return styles


def _grouped(styles: dict[str, str], facts: ModelFacts, source: str, problems: list[Problem]) -> list[LayerGroup]:
    """Puts each rowwise layer together with the colwise layers before it.

    The facts list layers in the order of their definition, not of their computation, which nobody knows before a forward
    pass. So colwise layers wait for the next rowwise one in this order.
    """
    layers = {layer.name: layer for layer in facts.layers}
    waiting: list[str] = []
    groups: list[LayerGroup] = []
    for name in layers:
        style = styles.get(name, "")
        if style in ("colwise", "colwise_gather"):
            if waiting and style != styles[waiting[-1]]:
                problems += _unpaired(waiting, styles)
                waiting = []
            waiting.append(name)
        elif style in ("rowwise", "rowwise_split"):
            partner = "colwise_gather" if style == "rowwise_split" else "colwise"
            if waiting and styles[waiting[-1]] == partner:
                groups.append(_group(tuple(waiting), name, layers, styles, facts, source))
                waiting = []
            elif style == "rowwise":
                problems += _unpaired([name], styles)
            else:
                # It takes the whole input and splits that itself, so it needs no partner.
                groups.append(LayerGroup(parent(name), (), name, False))
    problems += _unpaired(waiting, styles)
    return groups


def _group(
    first: tuple[str, ...],
    last: str,
    layers: Mapping[str, Layer],
    styles: Mapping[str, str],
    facts: ModelFacts,
    source: str,
) -> LayerGroup:
    # The innermost module that holds all layers of the group.
    module = parent(last)
    while not all(inside(name, module) for name in first):
        module = parent(module)
    # Three projections, or the three in one matrix, make an attention, whose heads count; fewer make an MLP.
    is_attention = len(first) >= 3 or (len(first) == 1 and first[0].rpartition(".")[2] == "qkv")
    attention = ""
    if is_attention:
        attention = parent(first[0])
    if styles[last] == "rowwise_split":
        return LayerGroup(module, first, last, False, "the plan says so", attention)
    block = _block_of(module, facts) or module
    own = [layer for layer in facts.layers if within(layer.name, block)]
    group = examined(LayerGroup(module, first, last, attention=attention), own, layers, block)
    # The plan has decided that the group is split: of what was examined, the heads count, and for a user's table also
    # the norms inside. A model's own plan names such norms itself.
    partial: tuple[str, ...] = ()
    if source == "table":
        partial = group.partial
    return replace(group, split=True, reason="", partial=partial)


def _unpaired(names: Iterable[str], styles: Mapping[str, str]) -> list[Problem]:
    partners = {"colwise": ("rowwise", "colwise_gather"), "rowwise": ("colwise", "rowwise_split")}
    problems = []
    for name in names:
        # The other styles take and give whole features, so they need no partner.
        if styles[name] not in partners:
            continue
        partner, alone = partners[styles[name]]
        problems.append(
            Problem(
                "tensor-unpaired",
                f"{name} is {styles[name]}, but there is no {partner} layer to match.",
                why="a colwise layer hands a share of its features to the rowwise layer that follows it in the same module",
                fix=f"make it {alone}, or give its partner a style",
            )
        )
    return problems


# -- what the model cannot do ---------------------------------------------------------------------------------------


def shares_heads(group: LayerGroup, width: int) -> bool:
    """Returns whether there are fewer key-value heads than ranks, so that several ranks compute the same one."""
    return group.split and 0 < group.kv_heads < width


def _shared(group: LayerGroup, layers: Mapping[str, Layer], width: int) -> list[str]:
    """Returns the key and value projections of a group whose heads several ranks compute.

    Every rank holds all rows of them, and computes those of the one head that its queries attend to.
    """
    if not shares_heads(group, width):
        return []
    queries = shape(layers[group.first[0]])[1]
    features = group.kv_heads * queries // group.heads
    return [name for name in group.first[1:] if shape(layers[name])[1] == features]


def _indivisible(group: LayerGroup, layers: Mapping[str, Layer], width: int) -> list[Problem]:
    # A rank computes whole heads: half of a head cannot attend.
    if group.split and group.heads and not _can_share(group, width):
        heads = f"{group.heads} heads"
        if group.kv_heads != group.heads:
            heads += f" and {group.kv_heads} key-value heads"
        possible_widths = [number for number in _all_divisors(group.heads) if _can_share(group, number)]
        fix = f"use tp = {_alternatives(possible_widths)}"
        if not possible_widths:
            fix += ", or a table that leaves its layers out"
        return [
            Problem(
                "tensor-heads",
                f"{group.attention} has {heads}, which {width} tensor-parallel ranks cannot share evenly.",
                why=f"tp={width}; {group.first[0]} puts out {shape(layers[group.first[0]])[1]} features",
                fix=fix,
            )
        ]
    shared = _shared(group, layers, width)
    for name in (*group.first, group.last):
        if name in shared:
            continue
        taken, given = shape(layers[name])
        # Colwise layers divide the features that they put out, the rowwise layer those that it takes in.
        if name == group.last:
            side = "takes in"
            features = taken
        else:
            side = "puts out"
            features = given
        if features % width:
            return [
                Problem(
                    "tensor-width",
                    f"{name} {side} {features} features, which {width} tensor-parallel ranks cannot share evenly.",
                    why=f"tp={width}; {layers[name].kind} of {taken} x {given}",
                    fix=f"use tp = {_divisors(features)}, or make it {_next_multiple(features, width)} wide",
                )
            ]
    return []


def _can_share(group: LayerGroup, width: int) -> bool:
    """Returns whether each rank can have as many query heads as every other, and as many key-value heads."""
    if group.heads % width:
        return False
    return group.kv_heads % width == 0 or width % group.kv_heads == 0


def _alike(problems: list[Problem]) -> list[Problem]:
    """Returns the first of those that differ by the number of the block alone, with how many there are."""
    kinds: dict[str, list[Problem]] = {}
    for problem in problems:
        # The message begins with the name of a layer, such as `layers.3.mlp.fc1`.
        name, _, message = problem.what.partition(" ")
        kind = sub(r"\d+", "*", name) + message
        kinds.setdefault(kind, []).append(problem)
    firsts = []
    for first, *others in kinds.values():
        if others:
            first = replace(first, why=f"{first.why}; so in {len(others)} more block{'s' * (len(others) > 1)}")
        firsts.append(first)
    return firsts


def _next_multiple(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


def _left_whole(tokens: int, width: int) -> str:
    return f"{tokens} tokens do not divide by {width}; {_next_multiple(tokens, width)} would"


def _divisors(number: int) -> str:
    return _alternatives(_all_divisors(number))


def _all_divisors(number: int) -> list[int]:
    return [divisor for divisor in range(2, min(number, 1024) + 1) if number % divisor == 0]


def _alternatives(numbers: list[int]) -> str:
    in_words = list(map(str, numbers))
    if len(in_words) < 2:
        return "".join(in_words) or "1"
    return f"{', '.join(in_words[:-1][:8])} or {in_words[-1]}"


def _vocabulary(facts: ModelFacts, styles: dict[str, str], whole: dict[str, str], width: int) -> None:
    """Divides the embedding of tokens and the head that has a row for each of them."""
    if not styles:  # nothing in the blocks is divided, and the model is refused for that (`tensor-nothing`)
        return
    outside = [layer for layer in facts.layers if not _block_of(layer.name, facts)]
    embeddings = [layer for layer in outside if layer.role == "embedding"]
    for head in outside:
        if not is_linear(head):
            continue
        rows = shape(head)[1]
        of_tokens = [layer.name for layer in embeddings if shape(layer)[0] == rows]
        if not of_tokens:
            continue
        if rows % width:
            whole[head.name] = _left_whole(rows, width)
            whole[of_tokens[0]] = _left_whole(rows, width)
        else:
            styles[head.name] = "colwise_gather"
            styles[of_tokens[0]] = "vocabulary"


def _tie(facts: ModelFacts, layers: Mapping[str, Layer], styles: dict[str, str]) -> list[Problem]:
    """Divides layers that share one weight alike: an embedding by vocabulary, as its head is by columns.

    Returns:
        A problem for each weight that its layers would divide in different ways.
    """
    problems: list[Problem] = []
    for names in facts.tied:
        members = [parent(name) for name in names]
        if not any(styles.get(name) in DIVIDED for name in members):
            continue
        # A layer without a style takes the one that fits its partner.
        for name in members:
            layer = layers.get(name)
            if layer is not None and layer.role == "embedding":
                styles.setdefault(name, "vocabulary")
            elif layer is not None and is_linear(layer):
                styles.setdefault(name, "colwise_gather")
        dims: set[int | None] = set()
        for name in members:
            dims.add(_dim(layers.get(name), styles.get(name, "")))
        if len(dims) > 1:
            styles_in_words = ", ".join(f"{name}: {styles.get(name, 'whole')}" for name in members)
            problems.append(
                Problem(
                    "tensor-tied",
                    f"{' and '.join(members)} share one weight, but it would be divided in different ways.",
                    why=styles_in_words,
                    fix="make the embedding `vocabulary` and the head `colwise_gather`, or all `replicated`",
                )
            )
    return problems


def _dim(layer: Layer | None, style: str) -> int | None:
    """Returns the dimension of the weight that is divided; None for a weight that stays whole."""
    if layer is None or style not in DIVIDED:
        return None
    # The weight of a linear layer or an embedding is [outputs or rows, features]; that of transformers' Conv1D is the other
    # way around, [inputs, outputs]. Only the rowwise styles divide what a layer takes in.
    divides_inputs = style.startswith("rowwise")
    is_transposed = layer.role == "conv1d"
    return int(divides_inputs != is_transposed)


def _indivisible_vocabulary(
    layers: Mapping[str, Layer], styles: dict[str, str], whole: dict[str, str], width: int, source: str
) -> list[Problem]:
    """Problems with embeddings whose rows do not divide; where the user asked for none, they and the head stay whole."""
    problems = []
    divided_embeddings = [name for name, style in styles.items() if style == "vocabulary"]
    for name in divided_embeddings:
        rows = shape(layers[name])[0]
        if rows % width == 0:
            continue
        if source == "table":
            why = f"tp={width}; options.tensor.plan makes it vocabulary"
            fix = f"make it {_next_multiple(rows, width)} rows, or `replicated`"
            what = f"{name} has {rows} rows, which {width} tensor-parallel ranks cannot share evenly."
            problems.append(Problem("tensor-width", what, why=why, fix=fix))
            continue
        # The head has as many outputs as the embedding has rows.
        for other in list(styles):
            if other == name or (is_linear(layers[other]) and shape(layers[other])[1] == rows):
                del styles[other]
                whole[other] = _left_whole(rows, width)
    return problems


def _requests(
    division: LayerDivision, facts: ModelFacts, sequence: bool, loss: bool, table: tuple[tuple[str, str], ...]
) -> list[Problem]:
    """Problems with what was asked for on top."""
    problems = []
    if not table and not any(style in DIVIDED for style in division.styles.values()):
        # The name of a model that is one layer is empty.
        linears = [layer.name or facts.name for layer in facts.layers if is_linear(layer)]
        why = "it has no plan of its own, and no repeated blocks, whose attention and MLP are known by their names"
        if facts.blocks:
            blocks = f"its {len(facts.blocks)} repeated blocks"
            why = f"it has no plan of its own, and {blocks} have no attention or MLP of a known name"
        computed = [layer.name or facts.name for layer in facts.layers if layer.role == "computed"]
        if computed:
            why += f"; the weights of {listed(computed)} are computed from other parameters"
        problems.append(
            Problem(
                "tensor-nothing",
                f"it is not known how the layers of {facts.name} could be divided.",
                why=f"{why}; linear layers: {listed(linears) or 'none'}",
                fix=f'write a table, such as {_EXAMPLE}, or {{"*": "replicated"}} to leave this model whole',
            )
        )
    if loss and not division.head:
        problems.append(
            Problem(
                "tensor-loss",
                "options.tensor.loss keeps logits divided, but the layer that computes them is not divided.",
                why="it is a linear layer behind the blocks with as many outputs as the embedding has rows, or one that "
                "the table makes colwise_gather",
                fix="leave `loss` out, or make that layer colwise_gather",
            )
        )
    if sequence or "sequence" in division.styles.values():
        odd = [layer.name for layer in facts.layers if _needs_positions(layer, division, facts)]
        if odd or not facts.blocks or not division.groups:
            reason = "no blocks repeat"
            if odd:
                reason = f"{odd[0]} is neither a norm nor in an attention or MLP that is divided"
            problems.append(
                Problem(
                    "tensor-sequence",
                    f"{facts.name} cannot be divided by position between its attentions and MLPs.",
                    why=reason + "; it may need all positions at once",
                    fix="leave `sequence` out",
                )
            )
    return problems


def _needs_positions(layer: Layer, division: LayerDivision, facts: ModelFacts) -> bool:
    """Returns whether a layer in a block may need other positions than this rank's."""
    block = _block_of(layer.name, facts)
    if not block or not layer.shapes or layer.role == "norm":
        return False
    inner_modules = [group.module for group in division.groups if group.module != block]
    return not within_some(layer.name, inner_modules)


def divided_elements(division: LayerDivision, facts: ModelFacts) -> int:
    """Elements of the parameters that are divided, tied ones once."""
    aliases = facts.aliases
    total = 0
    for layer in facts.layers:
        style = division.styles.get(layer.name, "")
        if style not in DIVIDED:
            continue
        for name, size in layer.shapes:
            # A rowwise layer's bias is added after the sum over the ranks, so that each rank holds all of it.
            whole_bias = len(size) == 1 and style.startswith("rowwise")
            if f"{layer.name}.{name}" not in aliases and not whole_bias:
                total += prod(size)
    return total
