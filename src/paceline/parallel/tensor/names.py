"""Finds attentions and MLPs in a model's facts by what their layers are called. Pure.

A layer's name says what it is (`q_proj`, `wq`, `query`, `to_q`; `fc1`, `c_fc`, `gate_proj`), its shapes and neighbours say
whether what lies between can be computed on a share of it:

    q, k, v -> attention -> o     split by heads, where the module says how many there are
    up (, gate) -> act -> down    split by features, where the widths agree
    qkv in one matrix             rows of q, k and v are mixed: the projections are divided, what lies between is whole
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from paceline.plan.facts import Layer, ModelFacts

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
LOCAL_HEADS = ("n_local_heads", "num_local_heads")
HEAD_DIM = ("head_dim", "d_head", "dim_head", "head_size", "attention_head_size", "d_k", "d_kv")


def shape(layer: Layer) -> tuple[int, int]:
    """Features in and out of a linear layer; rows and columns of an embedding."""
    first, second = dict(layer.shapes)["weight"]
    return (first, second) if layer.role in ("conv1d", "embedding") else (second, first)


def is_linear(layer: Layer) -> bool:
    """Whether the layer multiplies by a matrix and does nothing else."""
    return layer.role in ("linear", "conv1d")


def parent(name: str) -> str:
    """FQN of the module that holds this one."""
    return name.rpartition(".")[0]


def inside(name: str, module: str) -> bool:
    """Whether a FQN is that of a module inside another."""
    return not module or name.startswith(f"{module}.")


@dataclass(frozen=True)
class Group:
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

    groups: list[Group] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)


def derive(facts: ModelFacts) -> DerivedPlan:
    """Finds the attentions and MLPs inside the repeated blocks."""
    plan = DerivedPlan()
    layers = {layer.name: layer for layer in facts.layers}
    torch_attention = [layer.name for layer in facts.layers if layer.role == "attention"]
    for block in facts.blocks:
        own = [layer for layer in facts.layers if inside(layer.name, block) or layer.name == block]
        linears = {
            layer.name: layer
            for layer in own
            if is_linear(layer) and not any(inside(layer.name, outer) for outer in torch_attention)
        }
        used: set[str] = set()
        for module in _modules(block, linears):
            free = {
                name[len(module) + 1 :]: layer
                for name, layer in linears.items()
                if name not in used and inside(name, module)
            }
            for group in _groups(module, free, layers):
                group = examined(group, own, layers, block)
                used.update((*group.first, *filter(None, [group.last])))
                plan.groups.append(group)
        plan.whole.update({name: "its part is not known by its name" for name in linears if name not in used})
        for name in torch_attention:
            if inside(name, block):
                plan.whole[name] = "nn.MultiheadAttention holds q, k and v in one matrix"
    return plan


def _modules(block: str, linears: Iterable[str]) -> list[str]:
    """The block and the modules in it that hold linear layers, the innermost first."""
    modules = {block: None}
    for name in linears:
        while (name := parent(name)) != block:
            modules[name] = None
    return sorted(modules, key=lambda name: -name.count("."))


def _groups(module: str, free: Mapping[str, Layer], layers: Mapping[str, Layer]) -> Iterator[Group]:
    taken: set[str] = set()
    out = next((free[name] for name in OUT if name in free), None)
    for names in ATTENTION:
        if out is not None and out.name not in taken and all(name in free for name in names):
            first = tuple(free[name].name for name in names)
            taken.update((*first, out.name))
            yield Group(module, first, out.name, attention=parent(first[0]))
    fused = next((free[name] for name in FUSED if name in free), None)
    if fused is not None and out is not None and out.name not in taken and fused is not out:
        taken.update((fused.name, out.name))
        kind = "q, k and v are rows of one matrix"
        yield Group(module, (fused.name,), out.name, False, kind, attention=parent(fused.name))
    for first_names, last in MLP:
        members = [free.get(name) for name in (*first_names, last)]
        if all(member is not None and member.name not in taken for member in members):
            layers_of_group = [member.name for member in members if member is not None]
            taken.update(layers_of_group)
            yield Group(module, tuple(layers_of_group[:-1]), layers_of_group[-1])
    if not taken and is_sequence(module, layers):
        direct = [layer for name, layer in free.items() if "." not in name]
        if len(direct) == 2:
            yield Group(module, (direct[0].name,), direct[1].name)


def is_sequence(module: str, layers: Mapping[str, Layer]) -> bool:
    """Whether the module runs its children in order and does nothing else."""
    return module in layers and layers[module].kind == "Sequential"


def examined(group: Group, own: Iterable[Layer], layers: Mapping[str, Layer], block: str) -> Group:
    """The group with its heads, and with what keeps it from being split.

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
    partial: list[str] = []
    if not reason:
        others = [layer for layer in own if layer.name not in (*group.first, group.last)]
        if group.module == block and not is_sequence(block, layers):  # other attentions and MLPs of the block
            others = [layer for layer in others if layer.role == "norm" or layer.name in (block, group.attention)]
        reason = _between(group, others, (model, given), head_dim, width, partial)
    return replace(
        group, split=not reason, reason=reason, heads=heads, kv_heads=kv_heads, partial=() if reason else tuple(partial)
    )


def _heads(group: Group, layers: Mapping[str, Layer]) -> tuple[int, int, int]:
    """Heads, key-value heads and features of one head, 0 where the module does not say."""
    module = layers.get(group.attention)
    numbers = dict(module.numbers) if module else {}
    queries = shape(layers[group.first[0]])[1]
    head_dim = _number(numbers, HEAD_DIM, 0)
    heads = _number(numbers, HEADS, queries // head_dim if head_dim else 0)
    if not heads or queries % heads:
        return 0, 0, 0
    head_dim = queries // heads
    if len(group.first) == 1:
        return heads, heads, head_dim
    keys = shape(layers[group.first[1]])[1]
    if keys % head_dim:
        return 0, 0, 0
    return heads, keys // head_dim, head_dim


def _number(numbers: Mapping[str, int], names: Iterable[str], default: int) -> int:
    """The number under the first of these names that is there."""
    return next((numbers[name] for name in names if name in numbers), default)


def _between(
    group: Group, others: Iterable[Layer], models: tuple[int, int], head_dim: int, width: int, partial: list[str]
) -> str:
    """Why what lies between cannot be computed on a share; "" where it can. Fills `partial`."""
    for layer in others:
        own = layer.name in (group.module, group.attention)
        if not own and not inside(layer.name, group.module):
            continue
        last_name = layer.name.rpartition(".")[2]
        if not layer.shapes:
            elementwise = own or layer.kind.removesuffix("Activation").startswith(ELEMENTWISE)
            if last_name.isdigit() and parent(layer.name) == group.module and not elementwise:
                return f"{layer.kind} ({layer.name}) may need all features"
            continue
        features = layer.shapes[0][1][0] if layer.role == "norm" else 0
        of_heads = bool(group.attention) and last_name[:1] in "qk"
        if features and features == head_dim and (of_heads or features not in models):
            partial.append(layer.name)
        elif features not in models or of_heads or (features == width and not group.attention):
            return f"{layer.kind} ({layer.name or 'the model'}) has parameters that may need the whole"
    return ""
