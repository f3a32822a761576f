"""What a plan needs to know of a model: plain numbers and names, so that planning stays pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.plan.blocks import repeated_blocks

_NUMBERS = ("head", "dim", "size", "embd", "width", "model")  # in names of attributes that count heads or features


@dataclass(frozen=True)
class Layer:
    """One module that holds parameters of its own, ends a branch of the tree, is a sequence, or counts heads.

    Attributes:
        name: its FQN.
        kind: name of its class.
        role: "linear", "conv1d" (a linear with its weight turned), "embedding", "norm", "attention" (torch's), or "".
        shapes: its own parameters and their shapes.
        numbers: its whole-number attributes that may count heads or features.
    """

    name: str
    kind: str
    role: str = ""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    numbers: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class ModelFacts:
    """Facts about one model; on the meta device they are the same as on a real one.

    Attributes:
        name: class of the model.
        parameters: elements in all parameters, tied ones once.
        trainable: elements in those that require a gradient.
        parameter_bytes: bytes of all parameters, tied ones once.
        tied: groups of names that share one parameter.
        dtypes: dtypes of the trainable parameters, as text.
        half_names: trainable parameters held in float16; gradients of such cannot be unscaled.
        buffers: number of buffers.
        batch_norms: names of the modules that keep batch statistics of their own.
        random_layers: name and kind of the modules that say of themselves that they draw random numbers in training.
        sparse: whether some gradient is sparse.
        blocks: names of the repeated blocks, in order; see `plan.blocks`.
        meta: whether some tensor has a shape only, and is to get its values here.
        apart: whether each rank has built the values of its own stage of a pipeline alone; see `Stages`.
        devices: where its tensors are, those without values left out, as text.
        layers: its modules, see `Layer`, in order.
        modules: name and class of each module that can be called, in order, the root first.
        hooked: trainable parameters with hooks of the user's on their gradients.
        tensor_plan: the model's own plan for tensor parallelism (transformers' `tp_plan`): pattern -> style.
    """

    name: str
    parameters: int
    trainable: int
    parameter_bytes: int
    tied: tuple[tuple[str, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    half_names: tuple[str, ...] = ()
    buffers: int = 0
    batch_norms: tuple[str, ...] = ()
    random_layers: tuple[tuple[str, str], ...] = ()
    sparse: bool = False
    blocks: tuple[str, ...] = ()
    meta: bool = False
    apart: bool = False
    devices: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    tensor_plan: tuple[tuple[str, str], ...] = ()
    hooked: tuple[str, ...] = ()


def model_facts(model: Any) -> ModelFacts:
    """Reads the facts of a `torch.nn.Module`; changes nothing and computes nothing on its device."""
    names: dict[int, list[str]] = {}
    unique: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        unique[id(parameter)] = parameter
    trainable = [parameter for parameter in unique.values() if parameter.requires_grad]
    modules = list(model.named_modules())
    blocks = repeated_blocks(model)
    tensors = (*unique.values(), *model.buffers())
    apart = bool(getattr(model, "pipeline_apart", False))
    return ModelFacts(
        name=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in unique.values()),
        trainable=sum(parameter.numel() for parameter in trainable),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in unique.values()),
        tied=tuple(tuple(group) for group in names.values() if len(group) > 1),
        dtypes=_sorted_text(parameter.dtype for parameter in trainable),
        half_names=tuple(names[id(p)][0] for p in trainable if str(p.dtype) == "torch.float16"),
        buffers=sum(1 for _ in model.buffers()),
        batch_norms=tuple(name for name, module in modules if _normalises_batches(module)),
        random_layers=tuple((name, kind) for name, module in modules if (kind := _random(module))),
        sparse=any(getattr(module, "sparse", False) is True for _, module in modules),
        blocks=blocks,
        meta=not apart and any(tensor.is_meta for tensor in tensors),
        apart=apart,
        devices=_sorted_text(tensor.device for tensor in tensors if not tensor.is_meta),
        layers=tuple(layer for name, module in modules for layer in _layer(name, module)),
        modules=tuple((name, type(module).__name__) for name, module in modules if _callable(module)),
        tensor_plan=_tensor_plan(model),
        hooked=tuple(names[id(p)][0] for p in trainable if _hooked(p)),
    )


def _normalises_batches(module: Any) -> bool:
    """Whether a module is one of torch's batch norms; those that never train (`FrozenBatchNorm2d`) are none."""
    return any(base.__name__ == "_BatchNorm" for base in type(module).__mro__)


def _random(module: Any) -> str:
    """What makes a `torch.nn.Module` random, in a few words; "" where nothing in it says so."""
    kind = type(module).__name__
    bases = {base.__name__ for base in type(module).__mro__}
    if bases & {"RReLU", "FractionalMaxPool2d", "FractionalMaxPool3d"}:
        return kind
    by_class = "_DropoutNd" in bases or "drop" in kind.lower() or "StochasticDepth" in bases
    names = [key for key in vars(module) if "drop" in key.lower() or (by_class and key in ("p", "prob"))]
    for name in names:
        rate = vars(module)[name]
        if type(rate) is float and 0 < rate <= 1:
            return f"{kind} {name}={rate:g}"
    return ""


def _hooked(parameter: Any) -> bool:
    """Whether a hook on its gradient is anybody's but ours."""
    hooks = (*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values())
    return any(not str(getattr(hook, "__module__", "")).startswith("paceline.") for hook in hooks)


def _callable(module: Any) -> bool:
    """Whether a module computes something itself, as a `ModuleList` does not."""
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"


def _layer(name: str, module: Any) -> Iterable[Layer]:
    shapes = tuple((key, tuple(p.shape)) for key, p in module._parameters.items() if p is not None)
    numbers = tuple(
        (key, value)
        for key, value in vars(module).items()
        if type(value) is int and (key in ("h", "H") or any(word in key.lower() for word in _NUMBERS))
    )
    kind = type(module).__name__
    if shapes or numbers or not module._modules or kind == "Sequential":
        yield Layer(name, kind, _role(module), shapes, numbers)


def _role(module: Any) -> str:
    """What a module computes, where its class is known to compute just that."""
    if type(module).__name__ == "MultiheadAttention":
        return "attention"
    forward = getattr(type(module).forward, "__qualname__", "")
    if forward in ("Linear.forward", "Conv1D.forward"):
        return "conv1d" if forward[0] == "C" else "linear"
    if forward == "Embedding.forward":
        special = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        return "" if special else "embedding"
    flat = module._parameters and all(p is None or p.dim() == 1 for p in module._parameters.values())
    return "norm" if flat and not module._modules and "norm" in type(module).__name__.lower() else ""


def _tensor_plan(model: Any) -> tuple[tuple[str, str], ...]:
    """What transformers' models say of themselves; a base model's part lacks its prefix in the config."""
    own = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not own:
        own = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    return tuple((str(k), str(v)) for k, v in own.items()) if isinstance(own, dict) else ()


def _sorted_text(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(sorted({str(value).removeprefix("torch.") for value in values}))
