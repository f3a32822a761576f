"""Weights come in time: right values whatever is called after what, by how many threads, and when something fails."""

from __future__ import annotations

import threading

import pytest
import torch
from inference_models import IDS, made
from torch import nn

from paceline_large.inference import PlacedModel, placement_facts, placement_from_map
from paceline_large.inference.page_cache import MappedPages
from paceline_large.inference.streaming import BufferStream, CallOrder


class CopyingModel(PlacedModel):
    """Copies into buffers on the CPU, as on an accelerator."""

    def make_stream(self, blocks, device):
        return BufferStream(blocks, device, self.placement.num_buffers)


def placed(model: nn.Module) -> tuple[CopyingModel, BufferStream]:
    handle = CopyingModel(model, placement_from_map(placement_facts(model), {"": "disk"}))
    return handle, handle.streams["cpu"]


@pytest.mark.parametrize("tied", [False, True])
def test_the_same_results_in_any_order_of_calls(tied: bool) -> None:
    model, plain = made(tied=tied), made(tied=tied)
    handle, stream = placed(model)
    for order in (None, None, [0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 3, 1], [2], None):
        with torch.inference_mode():
            torch.testing.assert_close(model(IDS, order=order), plain(IDS, order=order), rtol=0, atol=0)
    assert len(stream._buffers) == 2
    handle.remove()
    assert torch.equal(model(IDS), plain(IDS)) and not stream._buffers


def test_parameters_have_their_values_between_calls() -> None:
    model, plain = made(), made()
    placed(model)
    with torch.no_grad():
        model(IDS)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_while_a_block_computes_the_next_one_is_copied() -> None:
    model = made()
    _, stream = placed(model)
    seen = []

    def look(module: nn.Module, args: object) -> None:
        for buffer in stream._buffers:
            buffer.filled.result()
        seen.append(sorted(stream._blocks.index(buffer.block) for buffer in stream._buffers))

    model.blocks[1].register_forward_pre_hook(look)
    with torch.no_grad():
        model(IDS)
        model(IDS)
    # The modules are embedding, blocks 0 to 3, norm, head.
    assert seen == [[2, 3], [2, 3]]


def test_a_block_that_raises_frees_its_buffer() -> None:
    model, plain = made(), made()
    _, stream = placed(model)
    with torch.no_grad():
        for _ in range(4):
            with pytest.raises(RuntimeError, match="shapes"):
                model.blocks[0](torch.ones(1, 3))
        torch.testing.assert_close(model(IDS), plain(IDS), rtol=0, atol=0)
    assert len(stream._buffers) == 2 and not any(buffer.users for buffer in stream._buffers)


def test_a_copy_that_fails_is_raised_where_the_block_is_called_and_can_be_repeated(monkeypatch) -> None:
    model, plain = made(), made()
    _, stream = placed(model)

    def out_of_memory(buffer: torch.Tensor) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(stream._blocks[1], "write_to", out_of_memory)
        with pytest.raises(MemoryError):
            model(IDS)
    assert not any(buffer.users for buffer in stream._buffers)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), plain(IDS), rtol=0, atol=0)


def test_threads_call_one_model_at_once() -> None:
    model, plain = made(), made()
    _, stream = placed(model)
    orders = [None, [3, 2, 1, 0], [1, 3], [0, 0, 2]]
    wrong: list[object] = []

    def call(order: list[int] | None) -> None:
        try:
            with torch.no_grad():
                expected = plain(IDS, order=order)
                for _ in range(30):
                    if not torch.equal(model(IDS, order=order), expected):
                        wrong.append(order)
        except Exception as error:  # shown by the main thread
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 2 <= len(stream._buffers) <= 5


def test_a_module_that_calls_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
            x = self.linear(x)
            return self(x, again=False) if again else x

    model = nn.ModuleDict({"blocks": nn.ModuleList([Twice(), Twice()])})
    x = torch.ones(1, 2)
    expected = model["blocks"][0](x)
    placed(model)
    with torch.no_grad():
        assert torch.equal(model["blocks"][0](x), expected)


def test_one_buffer_is_enough() -> None:
    _, stream = placed(made())
    single = BufferStream(stream._blocks, torch.device("cpu"), num_buffers=1)
    with torch.no_grad():
        for call in range(len(stream._blocks)):
            single.enter(call)
            single.leave(call)
    assert len(single._buffers) == 1
    single.close()


def test_the_order_is_learned_from_the_last_pass() -> None:
    order = CallOrder(4)
    assert [order.next_after(call) for call in (0, 1, 3, 2)] == [1, 2, 0, 3]
    assert [order.next_after(call) for call in (0, 1, 3, 2)] == [1, 3, 2, 0]


def test_pages_of_a_mapped_file_are_read_ahead(tmp_path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)) * 4096)
    mapped = torch.from_file(str(path), size=1 << 20, dtype=torch.uint8)
    pages = MappedPages([mapped[5000:9000], mapped[20000:1000000]])
    assert not pages.resident()
    pages.read()
    assert pages.resident()
    assert mapped[5000] == 5000 % 256
    assert MappedPages([]).resident() in (True, False)
