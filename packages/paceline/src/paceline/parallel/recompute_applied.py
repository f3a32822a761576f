"""What `recompute` does to a model: blocks forget activations and compute them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from paceline.base.errors import TrainError
from paceline.parallel.key_value_caches import CACHES
from paceline.parallel.recompute import PRODUCTS, chosen, overloads
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.plan.options import names_of
from paceline.world.forward import override_forward


def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """Replaces `forward` of the blocks that this rank holds."""
    modules = dict(model.named_modules())
    how: dict[str, Any] = {"use_reentrant": False}
    if context.plan.recompute == "selective":
        how["context_fn"] = partial(_selective, names_of(context.options.save), context.options.products)
    for name in chosen(context.plan.recompute, context.facts.blocks):
        if next(modules[name].parameters(), None) is not None:  # else another rank of a pipeline holds it
            _override(modules[name], how)
    return AppliedStrategy(model)


def _selective(save: Sequence[str], products: int) -> tuple[Any, Any]:
    """Returns torch's contexts of the two passes of one block.

    Args:
        save: names of the operations whose results are kept.
        products: of so many products of matrices, the first one is kept.
    """
    kept: list[Any] = []
    for name in save:
        kept += overloads(name)
    counted: list[Any] = []
    for name in PRODUCTS:
        counted += overloads(name)
    counts = {False: 0, True: 0}  # of products so far, in the first pass and in the second

    def policy(
        context: SelectiveCheckpointContext, operation: Any, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        if operation not in kept:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if operation in counted:
            number = counts[context.is_recompute]
            counts[context.is_recompute] += 1
            if number % products:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


def _override(block: nn.Module, how: dict[str, Any]) -> None:
    def forward(block: nn.Module, original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        # The block gets no cache of keys and values, which it would fill twice.
        keywords: dict[str, Any] = dict(kwargs)
        for name in keywords.keys() & set(CACHES):
            keywords[name] = None
        # The first call is not selective. Modules may do something in their first call only, such as building a table. The
        # operations of both runs must be the same, since selective checkpointing matches them by their order.
        if vars(block)[_RAN_BEFORE]:
            keywords |= how
        else:
            keywords["use_reentrant"] = False
        vars(block)[_RAN_BEFORE] = True
        # A compiled block changes its buffers once in any case.
        if not torch.compiler.is_compiling():
            keywords["context_fn"] = partial(_contexts, block, keywords.get("context_fn"))
        return checkpoint(original, *args, **keywords)

    vars(block)[_RAN_BEFORE] = "context_fn" not in how
    override_forward(block, "recompute", forward)


def _contexts(
    block: nn.Module, others: Callable[[], tuple[Any, Any]] | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of the first and of the second forward pass; `others` returns those that go inside."""
    first, second = others() if others is not None else (nullcontext(), nullcontext())
    before = {}
    for buffer in block.buffers():
        # Masks and tables of positions are large, and do not change.
        if not is_lazy(buffer) and buffer.numel() <= _LARGEST_THAT_CHANGES:
            before[id(buffer)] = (buffer, buffer.clone())
    flags = _Flags.of(block)

    @contextmanager
    def compute_again() -> Iterator[None]:
        with flags.set(), _second_pass(block, before, second):
            yield

    return first, _Again(compute_again)


class _Flags(NamedTuple):
    """What a script may change between the forward pass and the backward pass, as GANs do: modes, and what is frozen.

    Attributes:
        modes: which modules were in training mode.
        trained: which parameters had gradients. They are known by their names, since FSDP2 replaces them.
    """

    modes: list[tuple[nn.Module, bool]]
    trained: list[tuple[nn.Module, str, bool]]

    @classmethod
    def of(cls, block: nn.Module) -> _Flags:
        """Returns the flags of all modules of a block."""
        flags = cls([], [])
        for module in block.modules():
            flags.modes.append((module, module.training))
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    flags.trained.append((module, name, parameter.requires_grad))
        return flags

    @contextmanager
    def set(self) -> Iterator[None]:
        """Gives the block these flags, and afterwards its own again."""
        changed_modes = [module for module, is_training in self.modes if module.training != is_training]
        changed: list[nn.Parameter] = []
        for module, name, requires_grad in self.trained:
            parameter = module._parameters.get(name)
            if parameter is not None and parameter.requires_grad != requires_grad:
                changed.append(parameter)
        self._swap(changed_modes, changed)
        try:
            yield
        finally:
            self._swap(changed_modes, changed)

    @staticmethod
    def _swap(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
        for module in modules:
            module.training = not module.training
        for parameter in parameters:
            parameter.requires_grad_(not parameter.requires_grad)


class _Again(AbstractContextManager[None]):
    """Contexts of the passes that compute a block again: each backward pass through it has one.

    Args:
        new: makes the context of a pass.
    """

    def __init__(self, new: Callable[[], AbstractContextManager[None]]) -> None:
        self._new = new

    def __enter__(self) -> None:
        self._context = self._new()
        self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)


@contextmanager
def _second_pass(
    block: nn.Module, before: dict[int, tuple[Tensor, Tensor]], inside: AbstractContextManager[Any]
) -> Iterator[None]:
    """Gives the block other buffers, with the values that the first forward pass has found, and afterwards its own again.

    Args:
        block: what is computed again.
        before: the buffers that the first pass has found, by their `id`, each with a copy of its values.
        inside: a context of the second pass.

    Raises:
        TrainError: `recompute-twice`.
    """
    own: list[tuple[nn.Module, str, Tensor]] = []
    for module in block.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                own.append((module, name, buffer))
    others: dict[int, Tensor] = {}  # buffers that are shared by modules stay so
    for module, name, buffer in own:
        if id(buffer) not in others:
            _, values = before.get(id(buffer), (buffer, buffer))
            others[id(buffer)] = values.clone()
        module._buffers[name] = others[id(buffer)]
    try:
        with inside:
            yield
    except RuntimeError as error:
        if "backward an extra time" not in str(error):
            raise
        raise TrainError(
            "recompute-twice",
            "two backward passes go through a block that keeps some of its results (recompute=selective).",
            why="torch keeps them for one pass; create_graph=True (a gradient penalty) and retain_graph=True need them twice",
            fix="use recompute=blocks (`--recompute blocks`): then a block computes everything again for each pass",
        ) from error
    finally:
        for module, name, buffer in own:
            module._buffers[name] = buffer


_LARGEST_THAT_CHANGES = 2**16  # elements

_RAN_BEFORE = "_recomputed_before"  # an attribute of a block
