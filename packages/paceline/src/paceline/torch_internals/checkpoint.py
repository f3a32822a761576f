"""The private side of torch's file formats: the distributed checkpoint, and what `torch.save` pickles of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.utils import _create_file_view

# Classes and functions, by module and name, that the pickle of an index may ask for; dtypes come on top.
INDEX_GLOBALS = frozenset({
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),  # torch's own writer notes the folder
    ("pathlib._local", "PosixPath"),  # where Python 3.13, and no other, has this class
    (filesystem.__name__, "_StorageInfo"),
    (metadata.__name__, "BytesStorageMetadata"),
    (metadata.__name__, "ChunkStorageMetadata"),
    (metadata.__name__, "Metadata"),
    (metadata.__name__, "MetadataIndex"),
    (metadata.__name__, "StorageMeta"),
    (metadata.__name__, "TensorProperties"),
    (metadata.__name__, "TensorStorageMetadata"),
    (metadata.__name__, "_MEM_FORMAT_ENCODING"),
})  # fmt: skip


def storage_info(name: str, offset: int, length: int) -> Any:
    """Where one tensor lies, as the index says it: `relative_path`, `offset` and `length`."""
    return filesystem._StorageInfo(name, offset, length)


def file_view(file: BinaryIO, offset: int, length: int) -> Any:
    """A part of an open file as a file of its own, from which `torch.load` reads."""
    return _create_file_view(cast(Any, file), offset, length)


def storage_class_name(dtype: torch.dtype) -> str | None:
    """Name in `torch` of the class of storage that a pickle names for a dtype; None for the newer dtypes, which have none."""
    return torch.storage._dtype_to_storage_type_map().get(dtype)


def tensor_rebuilder(dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """The function by which `torch.save` pickles a tensor of a dtype, and the arguments that come after the usual six.

    Those are the storage, the offset in it, the shape, the strides, whether a gradient is wanted, and the hooks.
    """
    if storage_class_name(dtype) is None:
        return torch._utils._rebuild_tensor_v3, (dtype,)
    return torch._utils._rebuild_tensor_v2, ()


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool) -> None:
    """Copies each tensor into its target, in as few calls of the device as it allows."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)
