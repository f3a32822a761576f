"""`Sources`: from which other stages the values come that one stage computes.

A stub returns a placeholder, which has a shape but no values of use. `Sources` sees each operation of a pass, and remembers
of each result which placeholders it was computed from. It follows memory and not tensors, so that views are followed, too.

Placeholders are NaN besides, since a kernel that is no operation of torch (such as one of Triton) is not seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.torch_internals.dispatch import written_arguments
from paceline.torch_internals.tensors import TorchDispatchMode, memory_of
from paceline.world.sharded import is_sharded
from paceline.world.tree import tensors

# Operations that take only shape, dtype and device from their first argument: `zeros_like`, `new_ones`.
_SHAPE_ONLY = ("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "scalar_tensor")
# Operations whose result decides how the Python code goes on, or how large a tensor is.
_READ = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_consecutive")

_READING_METHODS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)


class ReadPlaceholder(Exception):
    """Code of a model asked for the value of a placeholder."""

    def __init__(self, sources: frozenset[str]) -> None:
        super().__init__(f"depends on {', '.join(sorted(sources))}")
        self.sources = sources


class _Reads(TorchFunctionMode):
    """Notices methods that read values without an operation."""

    def __init__(self, sources: Sources) -> None:
        super().__init__()
        self._sources = sources

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READING_METHODS:
            sources = self._sources.of(args[0])
            if sources:
                raise ReadPlaceholder(sources)
        return func(*args, **(kwargs or {}))


class Sources(TorchDispatchMode):
    """While it is open, results of operations have the sources of their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = _Reads(self)
        # By memory. The tensor is kept so that its memory is not given to another one meanwhile.
        self._known: dict[int, tuple[Tensor, frozenset[str]]] = {}

    def __enter__(self) -> Sources:
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._reads.__exit__(*error)  # type: ignore[no-untyped-call]

    def set(self, tensor: Tensor, sources: frozenset[str]) -> None:
        """Sets the sources of a tensor, and of all that share its memory."""
        self._known[memory_of(tensor)] = (tensor, sources)

    def of(self, tree: object) -> frozenset[str]:
        """Returns the sources of all tensors in a nested structure."""
        found: frozenset[str] = frozenset()
        if not self._known:
            return found
        for tensor in tensors(tree):
            # Parameters and what is computed from them may be DTensors, which have no memory. Placeholders are plain.
            if is_sharded(tensor):
                continue
            _, sources = self._known.get(memory_of(tensor), (None, frozenset()))
            found |= sources
        return found

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        output = func(*args, **keywords)
        sources = self.of((args, keywords))
        if not sources:
            return output
        name = str(func).split(".")[1]  # of "aten.add.Tensor"
        if name in _READ:
            raise ReadPlaceholder(sources)
        if name.endswith("_like") or name in _SHAPE_ONLY:
            return output
        for tensor in tensors((output, written_arguments(func, args, keywords))):
            if not is_sharded(tensor):
                self.set(tensor, sources | self.of(tensor))
        return output
