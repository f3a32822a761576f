"""The private side of fake tensors, which have a form and a device and no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.utils._python_dispatch import _disable_current_modes

from paceline.torch_internals.replaced import replaced


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    """A fake tensor on the CPU, of the shape, strides and dtype of `tensor`, that `torch.utils.swap_tensors` can take.

    What operations of the mode return it cannot from torch 2.15 on: the mode keeps a weak reference to each of them.
    """
    with _disable_current_modes():
        form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, form, torch.device("cpu"))


def make_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    """Takes the values from a tensor, which stays the same object; optimizers that hold it keep it."""
    fake = fake_like(tensor.detach(), mode)
    fake.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        fake._is_param = True
    torch.utils.swap_tensors(tensor, fake)
    assert isinstance(tensor, FakeTensor)
    return tensor


def fake_view(
    view: Callable[..., torch.Tensor], tensor: FakeTensor, mode: FakeTensorMode, args: Any, kwargs: dict[str, Any]
) -> FakeTensor:
    """What an operation gives that only looks at `tensor` in another way.

    torch does the same, after it has looked for a cached answer, which takes longer than the operation.
    """
    with in_kernel_invocation_manager(mode):
        form = view(*args, **kwargs)
    return FakeTensor(mode, form, tensor.device)


@contextmanager
def zeros_for_values() -> Iterator[None]:
    """While it is open, `numpy()` of fake tensors gives zeros, and a format shows zero."""

    def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
        with _disable_current_modes():
            return torch.zeros(tensor.shape, dtype=tensor.dtype).numpy()

    def form(tensor: torch.Tensor, spec: str) -> str:
        return format(0.0, spec)

    with replaced(FakeTensor, "numpy", numpy), replaced(FakeTensor, "__format__", form):
        yield


@contextmanager
def swappable(mode: FakeTensorMode) -> Iterator[None]:
    """While it is open, `torch.utils.swap_tensors` takes what operations of the mode returned.

    A tensor that something refers to weakly cannot be swapped; the mode's own table of fakes does.
    """
    swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors

    def forget_and_swap(first: torch.Tensor, other: torch.Tensor) -> None:
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(first, other)

    with replaced(torch.utils, "swap_tensors", forget_and_swap):
        yield


@contextmanager
def observed_resizes(observe: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """While it is open, `observe` is called with each storage that was resized, which no dispatch mode sees."""
    resize = torch.UntypedStorage.resize_

    def resize_and_observe(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        observe(storage)
        return result

    with replaced(torch.UntypedStorage, "resize_", resize_and_observe):
        yield


@contextmanager
def grouped_optimizer_kernels() -> Iterator[None]:
    """While it is open, torch's optimizers compute on all parameters at once, as they do on accelerators.

    There they make temporary tensors as large as all parameters together; on a CPU they go parameter by parameter.
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    name = "_get_foreach_kernels_supported_devices"
    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    types = [*optimizer._foreach_supported_types, FakeTensor]
    with (
        replaced(_foreach_utils, name, lambda: devices),
        replaced(optimizer, name, lambda: devices),
        replaced(optimizer, "_foreach_supported_types", types),
    ):
        yield
