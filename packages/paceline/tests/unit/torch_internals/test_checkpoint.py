"""What our checkpoints rely on in torch's file formats."""

from __future__ import annotations

import io
import pickle
import pickletools

import pytest
import torch
import torch.distributed.checkpoint as dcp

from paceline.torch_internals import checkpoint


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_globals_of_an_index(tmp_path) -> None:
    state = {"weight": torch.ones(2, 3), "half": torch.ones(2, dtype=torch.float16), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    content = (tmp_path / ".metadata").read_bytes()

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str):
            asked.add((module, name))
            return super().find_class(module, name)

    asked: set[tuple[str, str]] = set()
    index = Recorder(io.BytesIO(content)).load()
    dtypes = {("torch", "float32"), ("torch", "float16")}
    assert asked - dtypes <= checkpoint.INDEX_GLOBALS
    info = next(iter(index.storage_data.values()))
    assert checkpoint.storage_info(info.relative_path, info.offset, info.length) == info


def test_a_view_of_a_file_is_read_as_one(tmp_path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(5), buffer)
    path = tmp_path / "shard"
    path.write_bytes(b"before" + buffer.getvalue() + b"after")
    with open(path, "rb") as file:
        view = checkpoint.file_view(file, 6, len(buffer.getvalue()))
        assert torch.load(view, weights_only=True).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint16, torch.float8_e4m3fn])
def test_how_a_tensor_is_pickled(dtype: torch.dtype, tmp_path) -> None:
    import zipfile

    path = tmp_path / "tensor.pt"
    torch.save(torch.zeros(2, dtype=torch.uint8).to(dtype), path)
    with zipfile.ZipFile(path) as archive:
        record = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        pickled = archive.read(record)
    asked = [argument for code, argument, _ in pickletools.genops(pickled) if code.name == "GLOBAL"]
    rebuild, rest = checkpoint.tensor_rebuilder(dtype)
    assert f"torch._utils {rebuild.__name__}" in asked
    assert rest == (() if rebuild.__name__.endswith("v2") else (dtype,))
    name = checkpoint.storage_class_name(dtype)
    assert (f"torch {name}" in asked) == (name is not None)


def test_many_copies_at_once() -> None:
    targets = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)]
    sources = [torch.ones(3), torch.full((2, 2), 5)]
    checkpoint.copy_all(targets, sources, non_blocking=False)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
