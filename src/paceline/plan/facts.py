"""What a plan needs to know of a model: plain numbers and names, so that planning stays pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.plan.blocks import repeated_blocks


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
        sparse: whether some gradient is sparse.
        blocks: names of the repeated blocks, in order; see `plan.blocks`.
        block_parameters: elements in the parameters of each block.
        meta: whether some tensor has a shape only.
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
    sparse: bool = False
    blocks: tuple[str, ...] = ()
    block_parameters: tuple[int, ...] = ()
    meta: bool = False


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
    return ModelFacts(
        name=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in unique.values()),
        trainable=sum(parameter.numel() for parameter in trainable),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in unique.values()),
        tied=tuple(tuple(group) for group in names.values() if len(group) > 1),
        dtypes=_sorted_text(parameter.dtype for parameter in trainable),
        half_names=tuple(names[id(p)][0] for p in trainable if str(p.dtype) == "torch.float16"),
        buffers=sum(1 for _ in model.buffers()),
        batch_norms=tuple(name for name, module in modules if "BatchNorm" in type(module).__name__),
        sparse=any(getattr(module, "sparse", False) is True for _, module in modules),
        blocks=blocks,
        block_parameters=tuple(sum(p.numel() for p in model.get_submodule(name).parameters()) for name in blocks),
        meta=any(tensor.is_meta for tensor in (*unique.values(), *model.buffers())),
    )


def _sorted_text(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(sorted({str(value).removeprefix("torch.") for value in values}))
