"""`PlacedModel`: runs a model under a `Placement`, by hooks on its modules. The model is called as before."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.base.errors import PrepareError, TrainError
from paceline.world.tree import all_on, tensors, to_device
from paceline_large.inference.placement import PlacedBlock, Placement
from paceline_large.inference.streaming import BufferStream, MappedStream, Stream, StreamedBlock


class PlacedModel:
    """A model with hooks that move inputs, and copy offloaded weights, to the device on which each block computes.

    A model that is completely on one device needs no hooks: it is an ordinary model, and may be trained and copied.

    Args:
        model: its parameters must be where `placement` says: on their device, in host memory, or in a mapped file.
        placement: of this model.

    Attributes:
        model, placement: the arguments.
        streams: for each device, the stream that copies the weights of its offloaded blocks.
    """

    def __init__(self, model: nn.Module, placement: Placement) -> None:
        self.model = model
        self.placement = placement
        self.streams: dict[str, Stream] = {}
        self._handles: list[RemovableHandle] = []
        self._inputs_from = threading.local()
        offloaded = [placed for placed in placement.blocks if placed.offloaded]
        if placement.ordinary:
            return
        parameters = dict(model.named_parameters(remove_duplicate=False))
        calls: dict[str, tuple[Stream, int]] = {}  # name of a module -> its stream, and its number there
        for device in placement.devices:
            here = [placed for placed in offloaded if placed.device == device]
            if not here:
                continue
            stream = self.make_stream(_streamed_blocks(here, parameters), torch.device(device))
            self.streams[device] = stream
            # The numbers count modules in the order in which `_streamed_blocks` lists their blocks.
            modules: list[str] = []
            for placed in here:
                modules += placed.block.modules
            for number, module in enumerate(modules):
                calls[module] = (stream, number)
        self._attach(calls)

    def _attach(self, calls: Mapping[str, tuple[Stream, int]]) -> None:
        """Registers the hooks of the model and of its blocks; `calls` gives an offloaded module its stream and number."""
        self._handles += [
            self.model.register_forward_pre_hook(self._before_model, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(self._after_model, with_kwargs=True),
        ]
        several_devices = len(self.placement.devices) > 1
        for placed in self.placement.blocks:
            for name in placed.block.modules:
                stream, number = calls.get(name, (None, 0))
                # A module that contains blocks gets no hooks: each of its blocks moves its own inputs.
                if placed.block.own or not (several_devices or stream):
                    continue
                device = torch.device(placed.device) if several_devices else None
                hooks = _BlockHooks(device, stream, number)
                module = self.model.get_submodule(name)
                # `always_call`, so that a block that raises also gives its buffer back.
                self._handles += [
                    module.register_forward_pre_hook(hooks.before, with_kwargs=True, prepend=True),
                    module.register_forward_hook(hooks.after, always_call=True),
                ]

    def make_stream(self, blocks: Sequence[StreamedBlock], device: torch.device) -> Stream:
        """Returns the stream that provides the weights of a device's offloaded blocks.

        Args:
            blocks: for each module that is called, its block.
            device: the device on which they compute.
        """
        if device.type == "cpu":
            return MappedStream([block.homes for block in blocks])
        return BufferStream(blocks, device, self.placement.num_buffers)

    def remove(self) -> None:
        """Removes the hooks and ends the threads. Weights stay where they are offloaded."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for stream in self.streams.values():
            stream.close()
        self.streams.clear()

    def _before_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if torch.is_grad_enabled():
            self._refuse_training()
        # The output goes back to where the first input came from, so that the caller sees no change of device. Each thread has
        # an entry of its own, since several may call the model at the same time.
        inputs = tensors((args, kwargs))
        self._inputs_from.device = inputs[0].device if inputs else None
        device = torch.device(self.placement.main_device)
        return _moved(args, device), _moved(kwargs, device)

    def _after_model(self, module: nn.Module, args: object, kwargs: object, output: object) -> object:
        device = self._inputs_from.device
        return output if device is None else _moved(output, device)

    def _refuse_training(self) -> None:
        trainable = (name for name, parameter in self.model.named_parameters() if parameter.requires_grad)
        trained = next(trainable, None)
        if not self.model.training and trained is None:
            return
        why = "the model is in training mode, and gradients are recorded"
        if trained is not None:
            why = f"{trained} requires a gradient"
        raise TrainError(
            "placement-training",
            "a model that is placed for inference cannot be trained.",
            why=[why, "offloaded weights are no longer on their device when the backward pass needs them"],
            fix="call model.eval(), or train with Accelerator(plan=...), which shards a model that is too large",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedModel:
        if self._handles:
            _refuse_copy()
        return PlacedModel(copy.deepcopy(self.model, memo), self.placement)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._handles:
            _refuse_copy()
        return PlacedModel, (self.model, self.placement)


class _Entered(threading.local):
    """How many calls of a module are running in this thread; several if the module calls itself."""

    count = 0


class _BlockHooks:
    """The hooks before and after the forward of one module.

    Args:
        device: the device to which its inputs are moved; None if there is only one device.
        stream: the stream that provides its weights; None if they are not offloaded.
        number: the number of this module in the stream.
    """

    def __init__(self, device: torch.device | None, stream: Stream | None, number: int) -> None:
        self._device = device
        self._stream = stream
        self._number = number
        self._entered = _Entered()

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        if self._stream is not None:
            self._stream.enter(self._number)
            self._entered.count += 1
        if self._device is None:
            return None
        return _moved(args, self._device), _moved(kwargs, self._device)

    def after(self, module: nn.Module, args: object, output: object) -> None:
        # torch calls this hook also if `before` has raised, and nothing was entered.
        if self._stream is not None and self._entered.count:
            self._entered.count -= 1
            self._stream.leave(self._number)

    def __deepcopy__(self, memo: object) -> NoReturn:
        _refuse_copy()

    def __reduce__(self) -> NoReturn:
        _refuse_copy()


def _streamed_blocks(placed_blocks: Sequence[PlacedBlock], parameters: Mapping[str, Tensor]) -> list[StreamedBlock]:
    """Returns the block of each module that is called; modules that share parameters have the same block."""
    blocks = []
    for placed in placed_blocks:
        targets = [parameters[name] for name in placed.block.parameters]
        block = StreamedBlock(targets, [target.detach() for target in targets])
        if placed.home == "cpu" and placed.device != "cpu":
            block.pin()
        blocks += [block] * len(placed.block.modules)
    return blocks


def _moved(tree: Any, device: torch.device) -> Any:
    """Moves all tensors to a device; returns the same object if they are there already."""
    return tree if all_on(tree, device) else to_device(tree, device)


def _refuse_copy() -> NoReturn:
    raise PrepareError(
        "placement-copy",
        "a model that is placed for inference cannot be copied or pickled.",
        why="hooks copy its offloaded weights to each block, and a copy cannot have the same hooks",
        fix="load it twice, or save model.state_dict()",
    )
