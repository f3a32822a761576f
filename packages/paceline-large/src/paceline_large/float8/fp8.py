"""`fp8`: linear layers multiply in float8, by the recipes of torchao. Weights, gradients and checkpoints keep their dtypes.

    recipe                what has a scale of its own                     gradients of weights
    rowwise_with_gw_hp    each row                                        not in float8: as precise as everything else
    mxfp8                 each block of 32 values                         blocks of 32 rows
    rowwise               each row                                        each column, over all rows of a rank
    tensorwise            each tensor                                     each tensor

A scale over all rows of a rank depends on which rows the rank has, and so on the number of ranks: see `Float8Recipe.numbers`.

Source: torchao, `float8` and `prototype/moe_training`; OCP Microscaling Formats (MX) 1.0, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from paceline.base.errors import Problem
from paceline.config.kinds import one_of
from paceline.parallel.strategy import Strategy
from paceline.plan.facts import Layer, ModelFacts
from paceline.plan.fqn import inside, listed, parent
from paceline.plan.options import names_of, option
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin
from paceline_large.torchao_release import torchao_problem


@dataclass(frozen=True)
class Float8Recipe:
    """How products are scaled.

    Attributes:
        multiple: the sizes of a layer must be multiples of it.
        rows: the rows of an input are filled up with zeros to a multiple of it.
        numbers: how the numbers depend on the number of ranks. The figures are differences between the gradient of a batch and
            the sum of those of its halves, relative to its norm, of one layer in float32 (`tests/ranks/test_fp8.py`).
        blocks: whether scales span so few features that a division of features (tp) keeps them.
        depends: whether losses change visibly with the number of ranks.
        has_powers: whether scales are powers of two. Then a gradient that is three times as large is rounded elsewhere.
    """

    multiple: int
    rows: int
    numbers: str
    blocks: bool = False
    depends: bool = False
    has_powers: bool = True


RECIPES = {
    "rowwise_with_gw_hp": Float8Recipe(
        16, 1, "no scale spans several rows: the numbers of one process, up to rounding (2e-7)"
    ),
    "mxfp8": Float8Recipe(
        32,
        32,
        "a scale spans 32 values: the numbers of one process, up to rounding (8e-9), if each rank has a multiple of 32 rows "
        "(samples x positions)",
        blocks=True,
    ),
    "rowwise": Float8Recipe(
        16,
        16,
        "in gradients of weights a scale spans all rows of a rank: they differ from those of one process by 2e-3; losses of "
        "the same weights are equal",
    ),
    "tensorwise": Float8Recipe(
        16,
        16,
        "a scale spans all rows of a rank: losses and gradients depend on the number of processes (7e-2)",
        depends=True,
        has_powers=False,
    ),
}


@dataclass(frozen=True)
class Float8Options:
    """Which layers multiply in float8, and how."""

    recipe: str = option(
        "rowwise_with_gw_hp",
        one_of(*RECIPES),
        "How products are scaled; only the first two keep the numbers of one process.",
    )
    layers: str | tuple[str, ...] = option(
        "auto",
        None,
        "Patterns of layers' names; auto: all linear layers whose sizes fit, except the head. 'auto,lm_head' adds one. Or a "
        "function of a layer and its name.",
    )
    dtype: str = option(
        "auto",
        one_of("auto", "bf16", "float32"),
        "Arithmetic of everything else; auto: bf16 on an accelerator, float32 on a CPU.",
    )


@dataclass(frozen=True)
class LayersInFloat8:
    """Which layers of a model multiply in float8.

    Attributes:
        layers: their names, in order.
        left: other linear layers by the reason why they do not.
        misfits: layers that were asked for by name and cannot, each with its shape.
        unmatched: patterns that no linear layer matches.
    """

    layers: tuple[str, ...] = ()
    left: dict[str, list[str]] = field(default_factory=dict)
    misfits: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()


class Float8Products(Strategy):
    """Products in float8."""

    name = "fp8"
    stage = 15
    applied = "paceline_large.float8.fp8_applied"
    Options = Float8Options

    def wanted(self, plan: Plan) -> bool:
        """Used if the plan's precision is fp8."""
        return plan.precision == "fp8"

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses a missing torchao, sizes that the recipe does not allow, and models that hold float8 layers already."""
        precision = origin(plan, "mixed_precision")
        problem = torchao_problem("products in float8", "fp8", precision)
        problems = [problem] if problem else []
        converted = [name for name, kind in facts.modules if kind in ("Float8Linear", "MXFP8Linear")]
        if converted:
            problems.append(
                Problem(
                    "fp8-converted",
                    f"{facts.name} has layers that torchao has converted already.",
                    why=f"{precision} converts layers itself, and {listed(converted)} are no torch.nn.Linear any more",
                    fix="leave out `convert_to_float8_training`, and choose its recipe by options={'fp8': {'recipe': ...}}; or "
                    "keep it, and use mixed_precision='bf16'",
                )
            )
            return problems
        if "float64" in facts.dtypes:
            problems.append(
                Problem(
                    "fp8-dtype",
                    f"{facts.name} has parameters in float64.",
                    why=f"{precision}: products in float8 put out float32, bfloat16 or float16",
                    fix="call `model.float()` before `prepare`, or leave mixed_precision at no",
                )
            )
        recipe = self.options(plan).recipe
        if plan.layout.cp > 1 and RECIPES[recipe].depends:
            problems.append(
                Problem(
                    "fp8-context",
                    f"the recipe {recipe} computes other results for a divided sequence than for a whole one.",
                    why=f"{origin(plan, 'cp')}: a scale spans all positions of a rank",
                    fix="use --option fp8.recipe=rowwise_with_gw_hp",
                )
            )
        chosen = self.choose(plan, facts)
        multiple = RECIPES[recipe].multiple
        if chosen.misfits:
            parts = f", and each of tp={plan.layout.tp} ranks has a part" if plan.layout.tp > 1 else ""
            problems.append(
                Problem(
                    "fp8-shapes",
                    f"layers of {facts.name} have sizes that float8 products do not allow: {listed(chosen.misfits, 10)}.",
                    why=f"fp8.recipe={recipe}: sizes must be multiples of {multiple}{parts}; "
                    f"{origin(plan, 'options.fp8.layers')} asks for these layers",
                    fix=f"leave them out of fp8.layers (fp8.layers=auto does), or make their sizes multiples of {multiple}",
                )
            )
        if chosen.unmatched or not (chosen.layers or chosen.misfits):
            reasons = [f"{len(names)} left out ({listed(names)}): {reason}" for reason, names in chosen.left.items()]
            what = f"no layer of {facts.name} can multiply in float8."
            fix = "use mixed_precision='bf16' for this model, or fp8.layers='auto,NAME' with the name of a layer"
            if chosen.unmatched:
                what = f"no linear layer of {facts.name} is called {', '.join(chosen.unmatched)}."
                fix = "write names as in `model.named_modules()`, or leave fp8.layers at auto"
            problems.append(Problem("fp8-layers", what, why=[precision, *reasons], fix=fix))
        return problems

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Says which layers multiply in float8, and whether the numbers depend on the number of processes."""
        options = self.options(plan)
        chosen = self.choose(plan, facts)
        recipe = RECIPES[options.recipe]
        numbers = recipe.numbers
        if plan.half:
            numbers += f"; everything else is in {plan.half}, with its rounding"
        width = plan.layout.width
        if recipe.has_powers and width & (width - 1):
            numbers += (
                f"; the gradient of a loss is {width} times as large as on one process until it is averaged, and scales are "
                "powers of two, as this is not: gradients are rounded elsewhere (4e-2; not with 2, 4, 8, ... processes)"
            )
        if plan.layout.tp > 1 and not recipe.blocks:
            part = f"with tp={plan.layout.tp} a scale is that of a rank's part of the features"
            numbers += f"; {part}: losses differ by about 1e-3, and gradients after some steps by 3e-2"
        decisions = [Decision("fp8.numbers", options.recipe, "derived", reason=numbers)]
        reason = f"{listed(chosen.layers)} of {facts.name} multiply in float8"
        decisions.append(Decision("fp8.layers", len(chosen.layers), "derived", reason=reason))
        for reason, names in chosen.left.items():
            decisions.append(Decision("fp8.left_out", listed(names), "derived", reason=reason))
        return decisions

    def choose(self, plan: Plan, facts: ModelFacts) -> LayersInFloat8:
        """Decides which layers of a model multiply in float8."""
        options = self.options(plan)
        multiple = RECIPES[options.recipe].multiple
        parts = plan.layout.tp
        wanted, unmatched = _asked_for(options.layers, facts)
        is_automatic = "auto" in _patterns(options.layers)
        reason_of = _heads(facts) | _inside_attention(facts)
        layers = []
        left: dict[str, list[str]] = {}
        misfits = []
        for layer in _linears(facts):
            reason = ""
            fits = all(size % (multiple * parts) == 0 for size in dict(layer.shapes)["weight"])
            if not is_automatic and layer.name not in wanted:
                reason = "fp8.layers does not name them"
            elif layer.name not in wanted:
                reason = reason_of.get(layer.name, "")
            if not reason and not fits:
                sizes = f"their sizes are not multiples of {multiple}"
                if parts > 1:
                    sizes = f"their sizes are not multiples of {multiple} times tp={parts}"
                reason = sizes
                # A function that was written for torchao's conversion often looks at names alone.
                if layer.name in wanted and not callable(options.layers):
                    shape = " x ".join(map(str, dict(layer.shapes)["weight"]))
                    misfits.append(f"{layer.name} ({shape})")
                    continue
            if reason:
                left.setdefault(reason, []).append(layer.name)
            else:
                layers.append(layer.name)
        return LayersInFloat8(tuple(layers), left, tuple(misfits), unmatched)


def _linears(facts: ModelFacts) -> list[Layer]:
    """Returns the linear layers, each with a weight of its own, tied ones too."""
    return [layer for layer in facts.layers if layer.role == "linear" and "weight" in dict(layer.shapes)]


def _patterns(layers: object) -> tuple[str, ...]:
    return () if callable(layers) else names_of(layers)  # type: ignore[arg-type]


def _asked_for(layers: object, facts: ModelFacts) -> tuple[set[str], tuple[str, ...]]:
    """Returns the layers that were asked for by name or by a function, and the patterns that match none."""
    linears = _linears(facts)
    if callable(layers):
        # A function that was written for modules gets one of the same size without values.
        return {layer.name for layer in linears if layers(_stand_in(layer), layer.name)}, ()
    names: set[str] = set()
    unmatched = []
    for pattern in _patterns(layers):
        if pattern == "auto":
            continue
        matching = {layer.name for layer in linears if fnmatchcase(layer.name, pattern)}
        names |= matching
        if not matching:
            unmatched.append(pattern)
    return names, tuple(unmatched)


def _stand_in(layer: Layer) -> nn.Linear:
    shapes = dict(layer.shapes)
    size_out, size_in = shapes["weight"]
    return nn.Linear(size_in, size_out, bias="bias" in shapes, device="meta")


def _heads(facts: ModelFacts) -> dict[str, str]:
    """Returns the layers whose outputs are logits, with the reason to leave them out: their errors go into the loss itself."""
    reason = "the head puts out what the loss is computed from"
    heads = {}
    linears = _linears(facts)
    # The last layer of the model, unless it is a part of a repeated block.
    if linears and not any(inside(linears[-1].name, block) for block in facts.blocks):
        heads[linears[-1].name] = reason
    embeddings = {layer.name for layer in facts.layers if layer.role == "embedding"}
    for names in facts.tied:
        owners = set(map(parent, names))
        if owners & embeddings:
            heads |= {layer.name: reason for layer in linears if layer.name in owners}
    return heads


def _inside_attention(facts: ModelFacts) -> dict[str, str]:
    """Returns the layers of torch's attention, which reads their weights past their forward."""
    attentions = [layer.name for layer in facts.layers if layer.role == "attention"]
    reason = "torch.nn.MultiheadAttention multiplies by their weights itself"
    return {
        layer.name: reason
        for layer in _linears(facts)
        if any(inside(layer.name, attention) for attention in attentions)
    }


STRATEGY = Float8Products()
