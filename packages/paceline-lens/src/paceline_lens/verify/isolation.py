"""`isolation`: changes one sample, token or document of a batch, and says which outputs and gradients change that may not.

    samples     a sample must not act on another one of the batch: batch norm does, and so does a maximum over the batch
    causal      a token must not act on an earlier one
    documents   a token must not act on another document of its pack
    reach       a token must not act further than a sliding window lets it: (window - 1) * layers positions
    ranks       the batch of rank 0 must not act on another rank

Each probe runs the model as it is (in train or eval mode) with dropout off, the same random numbers and the same buffers, and
compares what each module returns. The first module whose output changes where it may not is the one that leaks. Gradients are
probed the other way round: which inputs does the output at one position depend on?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.errors import ConfigError
from paceline.torch_internals.modules import BatchNormBase
from paceline.world.tree import map_tensors, tensors
from paceline_lens.verify.quiet import Quiet

Law = Literal["samples", "causal", "documents", "reach", "ranks"]

_PROBES = 4  # samples and positions that are changed, spread over the batch
_VISIBLE = 1e-6  # relative change that counts: what is masked acts by exactly nothing
_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "x", "inputs", "input")
_HINTS = {
    "samples": "Normalize or reduce over the features of each sample, and not over the batch.",
    "causal": "Mask later positions: `is_causal=True`, or a mask that is true on and below the diagonal.",
    "documents": "Give attention the bounds of the documents: a block-diagonal "
    "mask, or cu_seqlens; a causal mask alone is not enough.",
    "reach": "Give attention the sliding window in each layer; a hook or another kernel may have dropped it.",
    "ranks": "Reduce over ranks only gradients and what is meant to be "
    "shared, such as statistics of a synchronized batch norm.",
}


@dataclass(frozen=True)
class Leak:
    """An influence that the law forbids.

    Attributes:
        law: which one.
        module: the first module, in the order of the forward pass, whose output changes; "" if only a gradient shows it.
        kind: its class.
        what: a sentence: what was changed, and what changes with it.
    """

    law: Law
    module: str
    kind: str
    what: str

    @property
    def where(self) -> str:
        """The module, for the end of a sentence."""
        if not self.module:
            return ""
        return f" by {self.module} ({self.kind})"

    @property
    def fix(self) -> str:
        """What to do."""
        if "BatchNorm" in self.kind:
            return "Batch norm normalizes by the batch: use group or layer norm, or accept it; `model.eval()` isolates samples."
        return _HINTS[self.law]


@dataclass
class IsolationReport:
    """What was probed, and what leaks; `str` of it is a report.

    Attributes:
        laws: what was probed.
        leaks: at most one for each law and way (outputs, gradients).
    """

    laws: list[str] = field(default_factory=list)
    leaks: list[Leak] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        for law in self.laws:
            leaks_of_law = [leak for leak in self.leaks if leak.law == law]
            if not leaks_of_law:
                lines.append(f"{law}: isolated")
                continue
            lines.append(f"{law}: LEAKS")
            fixes: dict[str, None] = {}  # each once, in order
            for leak in leaks_of_law:
                lines.append(f"  {leak.what}{leak.where}")
                fixes[leak.fix] = None
            lines += [f"  fix: {fix}" for fix in fixes]
        return "\n".join(lines)


def isolation(
    model: nn.Module,
    batch: Any,
    *,
    samples: bool = True,
    causal: bool = False,
    documents: Tensor | bool = False,
    reach: int | None = None,
    ranks: bool = False,
) -> IsolationReport:
    """Probes which parts of a batch act on each other in a model. The model, its buffers and random states stay as they are.

    Args:
        model: any module. It is called as `model(**batch)` for a dict, `model(*batch)` for a tuple or list, and `model(batch)`.
        batch: what it is called with. Token ids have the shape (samples, positions), or (positions,) in one pack; other inputs
            (samples, ...) or (samples, positions, features).
        samples: probe the samples of the batch.
        causal: probe that no position acts on an earlier one.
        documents: the number of each position's document, in the shape of the ids; True to take it from `document_ids`, the
            resets of `position_ids`, or `cu_seqlens` in the batch.
        reach: probe that no position acts further than this.
        ranks: probe that the batch of rank 0 does not act on other ranks.

    Returns:
        What leaks. With `ranks`, a rank reports what reaches it.

    Raises:
        ConfigError: `verify-isolation`, if there is nothing to change, or the model does not repeat its own outputs.

    Ranks: with `ranks`, or if the model communicates, all must call it together.
    """
    args, kwargs = _call_of(batch)
    return probed(model, args, kwargs, samples=samples, causal=causal, documents=documents, reach=reach, ranks=ranks)


def probed(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    samples: bool = True,
    causal: bool = False,
    documents: Tensor | bool = False,
    reach: int | None = None,
    ranks: bool = False,
) -> IsolationReport:
    """Does what `isolation` does, for a call with these arguments."""
    probe = _ModelProbe(model, args, kwargs)
    report = IsolationReport()
    if samples and probe.num_samples > 1:
        report.laws.append("samples")
        report.leaks += probe.sample_leaks()
    laws: dict[Law, Callable[[int, int, int], bool]] = {}
    if causal:
        laws["causal"] = lambda sample, source, target: target >= source
    if documents is not False:
        numbers = documents if isinstance(documents, Tensor) else _documents(args, kwargs)
        table = numbers.reshape(-1, probe.num_positions).tolist()
        laws["documents"] = lambda sample, source, target: (
            table[sample % len(table)][source] == table[sample % len(table)][target]
        )
    if reach is not None:
        laws["reach"] = lambda sample, source, target: abs(target - source) <= reach
    if laws and not probe.num_positions:
        raise _cannot("the input has no dimension of positions", f"its shape is {list(probe.input.shape)}")
    for law, may in laws.items():
        report.laws.append(law)
        report.leaks += probe.position_leaks(law, may)
    if ranks:
        report.laws.append("ranks")
        report.leaks += probe.rank_leaks()
    return report


def _call_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def _cannot(what: str, why: str) -> ConfigError:
    return ConfigError(
        "verify-isolation",
        f"the model cannot be probed: {what}.",
        why=why,
        fix="call `isolation(model, batch)` with the batch that the "
        "model is called with, in `model.eval()` if it draws numbers",
    )


def _documents(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Returns the number of each position's document, from what a packed batch carries."""
    ids = kwargs.get("document_ids")
    if ids is not None:
        return torch.as_tensor(ids)
    positions = kwargs.get("position_ids")
    if positions is not None:
        return (torch.as_tensor(positions) == 0).cumsum(-1)
    for name, bounds in kwargs.items():
        if name.startswith(("cu_seqlens", "cu_seq_lens")) and isinstance(bounds, Tensor):
            places = torch.arange(int(bounds[-1]), device=bounds.device)
            return torch.bucketize(places, bounds[1:].contiguous(), right=True)
    raise _cannot("it is not known where documents end", "the batch has no document_ids, position_ids or cu_seqlens")


Outputs = list[tuple[str, str, Tensor]]  # the name and class of each module that ran, and what it returned


class _ModelProbe:
    """A model and the batch that it is probed with."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._model = model
        self._args = args
        self._kwargs = kwargs
        self.input = self._input()
        # Ids of tokens have positions in their last dimension; (samples, features) has none.
        is_ids = not self.input.is_floating_point()
        self._is_flat = is_ids and self.input.dim() == 1
        self.num_samples = 1 if self._is_flat else len(self.input)
        has_positions = self._is_flat or self.input.dim() == 3 or (is_ids and self.input.dim() == 2)
        self.num_positions = self.input.shape[0 if self._is_flat else 1] if has_positions else 0
        self._base = self._run(self.input)
        for (name, _, value), (_, _, again) in zip(self._base, self._run(self.input), strict=False):
            if bool(_changed(value, again).any()):
                raise _cannot(
                    "it does not repeat its own outputs",
                    f"{name or 'the model'} returns other values for the same batch",
                )

    def _input(self) -> Tensor:
        named = [self._kwargs[name] for name in _INPUTS if isinstance(self._kwargs.get(name), Tensor)]
        for tensor in (*named, *tensors((self._args, self._kwargs))):
            if tensor.dim() and tensor.numel() > 1 and tensor.dtype != torch.bool:
                found: Tensor = tensor
                return found
        raise _cannot("the batch has no tensor that could be changed", "its tensors have one element, or none")

    def _run(self, value: Tensor, *, keep_graph: bool = False) -> Outputs:
        """Runs the model with another input, and returns what each module gave. Buffers and random states are put back."""
        outputs: Outputs = []
        handles = []
        for name, module in self._model.named_modules():

            def note(module: nn.Module, args: object, output: object, name: str = name) -> None:
                for leaf in tensors(output):
                    if leaf.is_floating_point() and leaf.dim():
                        outputs.append((name, type(module).__name__, leaf if keep_graph else leaf.detach().clone()))
                        break

            handles.append(module.register_forward_hook(note))
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        args, kwargs = map_tensors(lambda leaf: value if leaf is self.input else leaf, (self._args, self._kwargs))
        try:
            with torch.random.fork_rng(), torch.set_grad_enabled(keep_graph), Quiet():
                torch.manual_seed(0)
                self._model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            with torch.no_grad():
                for buffer, earlier in buffers:
                    buffer.copy_(earlier)
        return outputs

    def _other(self, place: Any) -> Tensor:
        """Returns the input with other values at a place: those that stand elsewhere, so that ids stay valid."""
        value = self.input.detach().clone()
        if value.is_floating_point():
            value[place] = value[place] * -1.5 + 0.5
        else:
            low, high = self.input.min(), self.input.max()
            value[place] = torch.where(self.input[place] == high, low, high)
        return value

    def _fits(self, output: Tensor, *, positions: bool) -> bool:
        dims = self.input.shape[: 1 if self._is_flat or not positions else 2]
        return output.shape[: len(dims)] == dims

    # -- probes ------------------------------------------------------------------------------------------------

    def sample_leaks(self) -> list[Leak]:
        """Changes one sample after the other."""
        for sample in _spread(self.num_samples):
            for (name, kind, before), (_, _, after) in self._pairs(self._other(sample)):
                if self._fits(before, positions=False):
                    changed = _changed(before, after).flatten(1).any(1)
                    changed[sample] = False
                    if bool(changed.any()):
                        other = int(changed.nonzero()[0])
                        what = f"another sample {sample} changes the output of sample {other}"
                        return [Leak("samples", *self._batch_norm_in(name, kind), what)]
        return []

    def _batch_norm_in(self, name: str, kind: str) -> tuple[str, str]:
        """Returns the name and class of a batch norm inside of a module; those of the module itself if it has none.

        A batch norm over samples and positions at once returns no dimension of samples alone, so that the module around it is
        found.
        """
        for inner_name, inner in self._model.get_submodule(name).named_modules():
            if isinstance(inner, BatchNormBase) and inner.training:
                return ".".join(filter(None, (name, inner_name))), type(inner).__name__
        return name, kind

    def position_leaks(self, law: Law, may: Callable[[int, int, int], bool]) -> list[Leak]:
        """Changes one position after the other, and then looks at gradients.

        Args:
            law: the law.
            may: whether in a sample (1) a position (2) may act on another (3).
        """
        leaks = []
        found = self._output_leak(law, may)
        if found is not None:
            leaks.append(found)
        found = self._gradient_leak(law, may)
        if found is not None:
            leaks.append(found)
        return leaks

    def _output_leak(self, law: Law, may: Callable[[int, int, int], bool]) -> Leak | None:
        for source in _spread(self.num_positions):
            for sample in _spread(self.num_samples):
                place = source if self._is_flat else (sample, source)
                for (name, kind, before), (_, _, after) in self._pairs(self._other(place)):
                    if self._fits(before, positions=True):
                        changed = _changed(before, after)
                        own = changed if self._is_flat else changed[sample]
                        for target in own.reshape(self.num_positions, -1).any(1).nonzero()[:, 0].tolist():
                            if not may(sample, source, target):
                                what = f"another token {source} changes the output of token {target} (sample {sample})"
                                return Leak(law, name, kind, what)
        return None

    def _gradient_leak(self, law: Law, may: Callable[[int, int, int], bool]) -> Leak | None:
        """Returns a position whose output has a gradient to an input that it must not depend on."""
        value = self.input.detach().clone().requires_grad_(self.input.is_floating_point())
        outputs = self._run(value, keep_graph=True)
        fitting = [entry for entry in outputs if self._fits(entry[2], positions=True) and entry[2].requires_grad]
        if not fitting:
            return None
        # Ids have no gradient: the first output, which is that of the embedding, stands for them.
        first = value if value.requires_grad else fitting[0][2]
        last = fitting[-1][2]
        for target in _spread(self.num_positions):
            for sample in _spread(self.num_samples):
                output = last[target] if self._is_flat else last[sample, target]
                weights = torch.linspace(0.5, 1.5, output.numel(), device=output.device, dtype=output.dtype)
                (gradient,) = torch.autograd.grad(
                    (output.flatten() * weights).sum(), first, retain_graph=True, allow_unused=True
                )
                if gradient is None:
                    continue
                own = gradient if self._is_flat else gradient[sample]
                size = own.reshape(self.num_positions, -1).abs().amax(1)
                for source in (size > _VISIBLE * size.max()).nonzero()[:, 0].tolist():
                    if not may(sample, source, target):
                        what = f"the gradient of the output of token {target} reaches token {source} (sample {sample})"
                        return Leak(law, "", "", what)
        return None

    def rank_leaks(self) -> list[Leak]:
        """Changes the batch of rank 0, and looks at the others."""
        rank = dist.get_rank()
        value = self._other(slice(None)) if rank == 0 else self.input
        for (name, kind, before), (_, _, after) in self._pairs(value):
            if rank and before.shape == after.shape and bool(_changed(before, after).any()):
                return [Leak("ranks", name, kind, f"another batch of rank 0 changes the output of rank {rank}")]
        return []

    def _pairs(self, value: Tensor) -> list[tuple[tuple[str, str, Tensor], tuple[str, str, Tensor]]]:
        """Returns what each module gave before, and with another input."""
        return list(zip(self._base, self._run(value), strict=False))


def _changed(before: Tensor, after: Tensor) -> Tensor:
    """Returns which elements changed by more than rounding."""
    scale = before.abs().max().clamp_min(1e-30)
    different = (before - after).abs() > _VISIBLE * scale
    return different | (before.isnan() != after.isnan())


def _spread(count: int) -> Sequence[int]:
    """Returns a few places, spread over all: the first and the last among them."""
    if count <= _PROBES:
        return range(count)
    return sorted({round(step * (count - 1) / (_PROBES - 1)) for step in range(_PROBES)})
