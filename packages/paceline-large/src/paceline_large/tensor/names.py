"""Finds attentions and MLPs in a model's facts by what their layers are called. Pure.

A layer's name says what it is (`q_proj`, `wq`, `query`, `to_q`; `fc1`, `c_fc`, `gate_proj`), its shapes and neighbours say
whether what lies between can be computed on a share of it:

    q, k, v -> attention -> o     split by heads, where the module says how many there are
    up (, gate) -> act -> down    split by features, where the widths agree
    qkv in one matrix             rows of q, k and v are mixed: the projections are divided, what lies between is whole
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from paceline.plan.facts import Layer, ModelFacts
from paceline.plan.fqn import inside, parent, within

ATTENTION = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("self.query", "self.key", "self.value"),
    ("attention.query", "attention.key", "attention.value"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("q_linear", "k_linear", "v_linear"),
    ("w_q", "w_k", "w_v"),
    ("Wq", "Wk", "Wv"),
    ("W_q", "W_k", "W_v"),
    ("queries", "keys", "values"),
    ("q", "k", "v"),
)
FUSED = ("c_attn", "qkv", "qkv_proj", "in_proj", "to_qkv", "query_key_value", "Wqkv", "wqkv", "W_pack", "attn_qkv")
OUT = (
    *("o_proj", "out_proj", "wo", "to_out", "to_out.0", "out_lin", "out_linear", "w_o", "Wo", "W_o", "o", "c_proj"),
    *("proj", "projection", "out", "output", "output.dense", "dense", "fc_out"),
)
MLP = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("gate", "up"), "down"),
    (("wi_0", "wi_1"), "wo"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("linear1",), "linear2"),
    (("lin1",), "lin2"),
    (("w1",), "w2"),
    (("fc_in",), "fc_out"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("up",), "down"),
    (("wi",), "wo"),
    (("fc",), "proj"),
)
# Modules without parameters that compute each element by itself, so that they may compute a share of them.
ELEMENTWISE = (
    *("ReLU", "GELU", "SiLU", "Mish", "Tanh", "Sigmoid", "ELU", "SELU", "CELU", "LeakyReLU", "ReLU6", "Hardswish"),
    *("Softplus", "Softsign", "LogSigmoid", "QuickGELU", "NewGELU", "Dropout", "Identity"),
)
HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead", "nheads", "num_head", "h", "H")
KV_HEADS = ("num_key_value_heads", "n_kv_heads", "n_kv_head", "num_kv_heads", "kv_heads", "n_local_kv_heads")
# Query heads for each key-value head.
GROUPS = ("n_rep", "num_key_value_groups", "num_queries_per_kv", "n_groups", "num_groups", "kv_groups", "q_per_kv")
LOCAL_HEADS = ("n_local_heads", "num_local_heads")
HEAD_DIM = ("head_dim", "d_head", "dim_head", "head_size", "attention_head_size", "d_k", "d_kv")


def shape(layer: Layer) -> tuple[int, int]:
    """Features in and out of a linear layer; rows and columns of an embedding."""
    first, second = dict(layer.shapes)["weight"]
    if layer.role in ("conv1d", "embedding"):
        return first, second
    return second, first  # the weight of `nn.Linear` is [features out, features in]


def is_linear(layer: Layer) -> bool:
    """Returns whether the layer multiplies by a matrix and does nothing else."""
    return layer.role in ("linear", "conv1d")


@dataclass(frozen=True)
class LayerGroup:
    """Layers that compute together: an attention, an MLP.

    Attributes:
        module: FQN of the module whose forward runs them.
        first: linear layers that are divided by what they put out.
        last: the linear layer, divided by what it takes in, which ends it; "" where nothing does.
        split: whether each rank computes its share of what lies between; otherwise every rank computes all of it.
        reason: why it is not split.
        attention: FQN of the module that counts the heads; "" in an MLP.
        heads, kv_heads: how many, 0 where unknown.
        partial: norms inside that see this rank's heads alone, so that their gradients are summed.
    """

    module: str
    first: tuple[str, ...]
    last: str
    split: bool = True
    reason: str = ""
    attention: str = ""
    heads: int = 0
    kv_heads: int = 0
    partial: tuple[str, ...] = ()


@dataclass
class DerivedPlan:
    """What names and shapes say of a model: groups of layers, and layers left whole, each with the reason."""

    groups: list[LayerGroup] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)


def derive(facts: ModelFacts) -> DerivedPlan:
    """Finds the attentions and MLPs inside the repeated blocks."""
    plan = DerivedPlan()
    layers = {layer.name: layer for layer in facts.layers}
    torch_attention = [layer.name for layer in facts.layers if layer.role == "attention"]
    for block in facts.blocks:
        own = [layer for layer in facts.layers if within(layer.name, block)]
        # Linear layers that no group has taken yet, in the order of definition.
        free: dict[str, Layer] = {}
        for layer in own:
            in_torch_attention = any(inside(layer.name, outer) for outer in torch_attention)
            if is_linear(layer) and not in_torch_attention:
                free[layer.name] = layer
        # The innermost modules first: a block may hold an attention, whose layers are then no longer the block's own.
        for module in _modules(block, free):
            local_names: dict[str, Layer] = {}
            for name, layer in free.items():
                if inside(name, module):
                    local_names[name[len(module) + 1 :]] = layer
            for group in _groups(module, local_names, layers):
                for name in (*group.first, group.last):
                    del free[name]
                plan.groups.append(examined(group, own, layers, block))
        plan.whole |= dict.fromkeys(free, "its part is not known by its name")
        computed = [layer.name for layer in own if layer.role == "computed"]
        plan.whole |= dict.fromkeys(computed, "its weight is computed from other parameters")
        for name in torch_attention:
            if inside(name, block):
                plan.whole[name] = "nn.MultiheadAttention holds q, k and v in one matrix"
    return plan


def _modules(block: str, linears: Iterable[str]) -> list[str]:
    """Returns the block and the modules in it that hold linear layers, the innermost first."""
    modules = {block: None}  # a dict, which keeps the order of definition
    for name in linears:
        module = parent(name)
        while module != block:
            modules[module] = None
            module = parent(module)
    return sorted(modules, key=lambda name: -name.count("."))


def _groups(module: str, free: Mapping[str, Layer], layers: Mapping[str, Layer]) -> list[LayerGroup]:
    """Returns the attention and the MLP among the free linear layers of a module.

    Args:
        module: FQN of the module.
        free: linear layers in it, by their names inside it.
        layers: all layers of the model, by FQN.
    """
    untaken = dict(free)
    groups = []

    def take(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(untaken.pop(name).name for name in names)

    # A module has one attention at most: the first set of names that matches takes `out`.
    out = _first_of(OUT, free)
    for names in ATTENTION:
        if out in untaken and all(name in untaken for name in names):
            *first, last = take((*names, out))
            groups.append(LayerGroup(module, tuple(first), last, attention=parent(first[0])))
    fused = _first_of(FUSED, free)
    if out in untaken and fused in untaken:
        projection, last = take((fused, out))
        reason = "q, k and v are rows of one matrix"
        groups.append(LayerGroup(module, (projection,), last, False, reason, attention=parent(projection)))
    for first_names, last_name in MLP:
        if all(name in untaken for name in (*first_names, last_name)):
            *first, last = take((*first_names, last_name))
            groups.append(LayerGroup(module, tuple(first), last))
    if not groups and is_sequence(module, layers):
        direct = [layer.name for name, layer in free.items() if "." not in name]
        if len(direct) == 2:
            groups.append(LayerGroup(module, (direct[0],), direct[1]))
    return groups


def _first_of(names: Iterable[str], free: Mapping[str, Layer]) -> str:
    """Returns the first of these names that a free layer has; "" where none has."""
    for name in names:
        if name in free:
            return name
    return ""


def is_sequence(module: str, layers: Mapping[str, Layer]) -> bool:
    """Returns whether the module runs its children in order and does nothing else."""
    return module in layers and layers[module].is_sequence


def examined(group: LayerGroup, own: Iterable[Layer], layers: Mapping[str, Layer], block: str) -> LayerGroup:
    """Returns the group with its heads, and with what keeps it from being split.

    Args:
        group: as its names say.
        own: layers of its block.
        layers: all, by name.
        block: FQN of its block.
    """
    model, width = shape(layers[group.first[0]])
    taken, given = shape(layers[group.last])
    reason = group.reason
    heads = 0
    kv_heads = 0
    head_dim = 0
    if group.attention:
        heads, kv_heads, head_dim = _heads(group, layers)
        if not reason and not heads:
            reason = f"{group.attention} does not say how many heads it has"
    if not reason and taken != width:
        reason = f"{group.first[0]} puts out {width} features, {group.last} takes {taken}"
    partial: tuple[str, ...] = ()
    if not reason:
        others = [layer for layer in own if layer.name not in (*group.first, group.last)]
        # Where the block itself runs the group, the other layers in it may belong to other attentions and MLPs.
        if group.module == block and not is_sequence(block, layers):
            of_group = (block, group.attention)
            others = [layer for layer in others if layer.role == "norm" or layer.name in of_group]
        reason, partial = _between(group, others, (model, given), head_dim, width)
    return replace(group, split=not reason, reason=reason, heads=heads, kv_heads=kv_heads, partial=partial)


def _heads(group: LayerGroup, layers: Mapping[str, Layer]) -> tuple[int, int, int]:
    """Heads, key-value heads and features of one head, 0 where the module does not say."""
    numbers: dict[str, int] = {}
    if group.attention in layers:
        numbers = dict(layers[group.attention].numbers)
    queries = shape(layers[group.first[0]])[1]
    head_dim = _number(numbers, HEAD_DIM)
    heads = _number(numbers, HEADS)
    if not heads and head_dim:
        heads = queries // head_dim
    if not heads or queries % heads:
        return 0, 0, 0
    # Where a module says both, the number of heads and the shape of the projection decide.
    head_dim = queries // heads
    if len(group.first) == 1:
        return heads, heads, head_dim
    # With grouped queries the key projection is narrower than the query projection.
    keys = shape(layers[group.first[1]])[1]
    if keys % head_dim:
        return 0, 0, 0
    return heads, keys // head_dim, head_dim


def _number(numbers: Mapping[str, int], names: Iterable[str]) -> int:
    """Returns the number under the first of these names that is there, or 0."""
    for name in names:
        if name in numbers:
            return numbers[name]
    return 0


def _between(
    group: LayerGroup, others: Iterable[Layer], model_widths: tuple[int, int], head_dim: int, width: int
) -> tuple[str, tuple[str, ...]]:
    """Looks at what lies between the first layers of a group and its last.

    Args:
        group: the layers.
        others: layers that may lie between.
        model_widths: features that the group takes and gives.
        head_dim: features of a head, 0 where unknown.
        width: features between the layers.

    Returns:
        Why it cannot be computed on a share, "" where it can; and then the norms that see this rank's heads alone.
    """
    partial: list[str] = []
    for layer in others:
        own = layer.name in (group.module, group.attention)
        if not own and not inside(layer.name, group.module):
            continue
        last_name = layer.name.rpartition(".")[2]
        if not layer.shapes:
            # The children of a `Sequential` have numbers for names, and run one after the other: one between the two
            # layers gets a share of the features.
            elementwise = own or layer.kind.removesuffix("Activation").startswith(ELEMENTWISE)
            if last_name.isdigit() and parent(layer.name) == group.module and not elementwise:
                return f"{layer.kind} ({layer.name}) may need all features", ()
            continue
        features = 0
        if layer.role == "norm":
            features = layer.shapes[0][1][0]  # of its weight, [features]
        # `q_norm` and `k_norm` normalise inside a head or over all heads; a norm as wide as the model may also lie before
        # or behind the group, where it sees everything.
        of_heads = bool(group.attention) and last_name[:1] in "qk"
        if features and features == head_dim and (of_heads or features not in model_widths):
            partial.append(layer.name)
        elif features not in model_widths or of_heads or (features == width and not group.attention):
            return f"{layer.kind} ({layer.name or 'the model'}) has parameters that may need the whole", ()
    return "", tuple(partial)
