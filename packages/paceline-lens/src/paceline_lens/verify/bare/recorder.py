"""`BareRecorder` records a script that has nothing of Paceline in it, from outside.

    models       the outermost modules with trainable parameters that are called, and their inputs
    losses       the tensors whose `backward` is called, and by what they were divided
    raw          what each backward pass adds to a gradient on this rank, before anyone reduces it (hooks on parameters)
    gradients    what the optimizer finds when it steps (torch's hook on all optimizers)
    calls        `all_reduce` of gradients and `clip_grad_norm_`, with their lines in the script
    copies       modules and dicts of the script that hold another copy of the weights, such as an average of them

Each is a short sketch of a tensor (`sketch.py`). The sketch of a sum is the sum of the sketches, so that a comparison can tell
what was added and by what it was divided. A rank sketches its own part of a divided tensor, so that recording needs no
collective. The run on one process also sketches the parts that ranks may hold.

While the script runs, dropout drops nothing, as in `Recorder`. Nothing else is changed, except for what `share` and `nudge`
say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler

from paceline.base import env as environment
from paceline.checkpoint.state.module_state import clean, unwrap
from paceline.data.unprepared import iterated_loaders
from paceline.launch.job import Target
from paceline.launch.worker.worker import become, leave
from paceline.torch_internals.modules import BatchNormBase
from paceline.torch_internals.replaced import replaced
from paceline.world.param_groups import parameters_of
from paceline.world.places import line_of, user_frame
from paceline.world.sharded import is_sharded, local, whole
from paceline.world.tree import tensors
from paceline_lens.verify.bare.loss_graph import divisors
from paceline_lens.verify.quiet import Quiet, nudge_weights
from paceline_lens.verify.recording import Recording, number_of, prefix_of
from paceline_lens.verify.sketch import rows, sketch

# Steps of which gradients before their reduction are recorded: mistakes in the reduction show in the first step, or in the
# first one that something begins in.
_RAW_STEPS = 3


class EnoughSteps(BaseException):
    """Ends a script that has taken enough steps; a script's `except Exception` does not catch it."""


class BareRecorder:
    """Records one process of a script.

    Args:
        folder: where the recording goes, as `rank<n>.json`.
        steps: steps of the first optimizer after which the script is ended.
        parts: numbers of parts for which parts of tensors are sketched, too; those of the runs to compare with.
        share: by what batch sizes of DataLoaders are divided; 1 leaves them as they are.
        nudge: changes each initial weight by this part of itself, up or down: how fast does rounding grow?
    """

    def __init__(
        self, folder: Path, steps: int, *, parts: Sequence[int] = (), share: int = 1, nudge: float = 0.0
    ) -> None:
        self.recording = Recording(bare=True)
        self._folder = folder
        self._steps = steps
        self._parts = parts
        self._share = share
        self._nudge = nudge
        self._quiet = Quiet()
        self._depth = 0  # of forward passes that are running
        self._known: set[int] = set()  # ids of all modules of the models
        self._models: dict[int, int] = {}  # the number of a model by its id
        self._kept: list[nn.Module] = []  # so that no other module gets the id of one
        self._names: dict[int, str] = {}  # by id of a parameter
        self._parameters: dict[str, Tensor] = {}
        self._raw: dict[str, list[float]] | None = None  # of the backward pass that is running
        self._optimizers: list[torch.optim.Optimizer] = []
        self._taken = 0  # steps of the first optimizer
        self._loaders: list[Any] | None = None
        self._variables: dict[str, Any] = {}  # of the script, as they were in the last step

    # -- the run ---------------------------------------------------------------------------------------------

    def run(self, target: Target) -> None:
        """Runs the script in this process, which ends without returning from here once the script has taken enough steps."""
        local_rank = environment.get("LOCAL_RANK") or 0
        if self.record(lambda: become(target.on(local_rank))):
            if dist.is_initialized():
                dist.barrier()  # a rank that ended earlier would close connections that others still use
            leave(0)

    def record(self, work: Callable[[], object]) -> bool:
        """Runs `work` and writes the recording, however it ends; returns whether it was ended after enough steps."""
        self.recording.rank = environment.get("RANK") or 0
        self._quiet.listen(loss=self._note_loss, read=self._note_read)
        with ExitStack() as hooks:
            for handle in (
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                hooks.callback(handle.remove)
            # Torch's hooks on all modules do not see keyword arguments.
            hooks.enter_context(replaced(nn.Module, "__call__", self._noting_forward(nn.Module.__call__)))
            hooks.enter_context(replaced(dist, "all_reduce", self._noting_reduction(dist.all_reduce)))
            for module in (nn.utils, nn.utils.clip_grad):
                hooks.enter_context(replaced(module, "clip_grad_norm_", self._noting_clip(module.clip_grad_norm_)))
            if self._share > 1:
                hooks.enter_context(replaced(DataLoader, "__init__", self._sharing(DataLoader.__init__)))
            hooks.callback(self._write)
            with self._quiet:
                try:
                    work()
                except EnoughSteps:
                    return True
        return False

    def _write(self) -> None:
        self.recording.add("end", weights=self._weights(), copies=self._copies())
        self.recording.write(self._folder)

    # -- models ------------------------------------------------------------------------------------------------

    def _noting_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                self._note_forward(module, args, kwargs)
            self._depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _note_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Records the rows that a model is called with."""
        # A loss may be a module, too, but it has nothing to train. A block that is recomputed in the backward pass is known.
        if id(module) not in self._known:
            if not any(parameter.requires_grad for parameter in module.parameters()):
                return
            self._add_model(module)
        if torch.is_grad_enabled() and id(module) in self._models:
            shapes = [list(leaf.shape[1:]) for leaf in tensors((args, kwargs)) if leaf.dim()]
            self.recording.add("forward", number=self._models[id(module)], rows=rows((args, kwargs)), shapes=shapes)

    def _add_model(self, module: nn.Module) -> None:
        number = len(self._models)
        prefix = prefix_of(number)
        inner = unwrap(module)
        described: dict[str, Any] = {}
        weights: dict[str, Any] = {}
        if self._nudge:
            nudge_weights(map(_own_part, inner.parameters()), self._nudge)
        for owner_name, owner in inner.named_modules():
            for short_name, parameter in owner.named_parameters(recurse=False):
                name = prefix + clean(f"{owner_name}.{short_name}" if owner_name else short_name)
                # A tied parameter counts once, under its first name.
                if id(parameter) in self._names:
                    continue
                self._names[id(parameter)] = name
                self._parameters[name] = parameter
                described[name] = {
                    "shape": list(_own_part(parameter).shape),
                    "place": _place(parameter),
                    "module": type(owner).__name__,
                    "dtype": str(parameter.dtype).removeprefix("torch."),
                }
                weights[name] = self._with_parts(parameter)
                # A DTensor's gradient is reduced before any hook of its parameter sees it.
                if parameter.requires_grad and not is_sharded(parameter):
                    parameter.register_hook(partial(self._note_raw, name))
        norms = [name for name, layer in inner.named_modules() if _has_own_statistics(layer)]
        gathers = any("FSDPModule" in (kind.__name__ for kind in type(layer).__mro__) for layer in inner.modules())
        self.recording.add(
            "model",
            number=number,
            parameters=described,
            weights=weights,
            batch_norms=norms,
            gathers=gathers,
            # A model that is first called after a step may have other weights by then.
            is_late=bool(self._optimizers),
        )
        if self.recording.rank == 0 and described:
            self.recording.dtype = next(iter(described.values()))["dtype"]
        self._models[id(module)] = number
        self._kept.append(module)
        self._known.update(map(id, module.modules()))

    # -- backward passes -----------------------------------------------------------------------------------------

    def _note_loss(self, loss: Tensor) -> None:
        divided, is_mean = divisors(loss)
        value = float(loss.detach().sum().double())
        event = self.recording.add("backward", loss=value, line=_line(), divisors=divided, is_mean=is_mean, raw={})
        self._raw = event["raw"]

    def _note_raw(self, name: str, gradient: Tensor) -> None:
        if self._taken >= _RAW_STEPS:
            return
        if self._raw is None:  # a script may call `torch.autograd.backward`, which no hook sees
            event = self.recording.add("backward", loss=None, line=_line(), divisors=[], is_mean=False, raw={})
            self._raw = event["raw"]
        values = sketch(gradient)
        earlier = self._raw.get(name)
        if earlier is not None:
            values = [x + y for x, y in zip(values, earlier, strict=True)]
        self._raw[name] = values

    def _note_read(self, tensor: Tensor, frame: FrameType) -> None:
        """Notes a number that the script itself reads from a loss."""
        own = user_frame()
        if own is frame and tensor.numel() == 1 and tensor.is_floating_point() and self._taken < _RAW_STEPS:
            self.recording.add("read", value=tensor.detach().double().reshape(-1).tolist()[0], line=_line())

    def _noting_reduction(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            names = self._gradients_in(tensor)
            if names:
                self.recording.add("call", name="all_reduce", line=_line(), gradients=names)
            return original(tensor, *args, **kwargs)

        return all_reduce

    def _gradients_in(self, tensor: Tensor) -> list[str]:
        """Returns the parameters whose gradients share memory with a tensor."""
        if self._taken >= _RAW_STEPS or is_sharded(tensor):
            return []
        storage = tensor.untyped_storage().data_ptr()
        names = []
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is not None and local(gradient).untyped_storage().data_ptr() == storage:
                names.append(name)
        return names

    def _noting_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            event = self.recording.add("call", name="clip_grad_norm_", line=_line(), gradients=[])
            norm = original(*args, **kwargs)
            # What is a DTensor could only be read by all ranks together.
            if isinstance(norm, Tensor) and not is_sharded(norm):
                event["norm"] = norm.detach().double().tolist()
            return norm

        return clip_grad_norm_

    def _sharing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def init(loader: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
            if batch_size is not None and batch_size % self._share == 0:
                batch_size //= self._share
            original(loader, dataset, batch_size, *args, **kwargs)

        return init

    # -- steps ---------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Records the gradients as the optimizer finds them: reduced and clipped."""
        number = number_of(optimizer, self._optimizers)
        gradients: dict[str, Any] = {}
        held = 0
        for place, parameter in enumerate(parameters_of(optimizer)):
            name = self._names.get(id(parameter))
            held += name is not None
            gradient = parameter.grad
            if gradient is not None:
                gradients[name or f"optimizer{number}[{place}]"] = self._with_parts(gradient)
        frame = user_frame()
        self._variables = {} if frame is None else {**frame.f_globals, **frame.f_locals}
        self._step = self.recording.add(
            "step",
            optimizer=number,
            line=_line(),
            rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            gradients=gradients,
            held=held,
            weights=self._weights(),
            epochs=self._epochs(),
        )
        self._raw = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._taken += number_of(optimizer, self._optimizers) == 0
        if self._taken >= self._steps:
            raise EnoughSteps

    def _weights(self) -> dict[str, list[float]]:
        return {name: sketch(_own_part(parameter)) for name, parameter in self._parameters.items()}

    def _with_parts(self, tensor: Tensor) -> dict[str, list[float]]:
        """Returns the sketch of a rank's part of a tensor under "", and those of the parts that other widths may have of it."""
        own = _own_part(tensor)
        sketches = {"": sketch(own)}
        for dim in range(own.dim()):
            for number in self._parts:
                for index, part in enumerate(own.detach().chunk(number, dim)):
                    sketches[f"{dim}:{number}:{index}"] = sketch(part)
        return sketches

    def _epochs(self) -> list[int]:
        """Returns the epoch of each shuffling DistributedSampler that the script reads by."""
        if self._loaders is None:
            self._loaders = iterated_loaders([])
        samplers = [loader.sampler for loader in self._loaders]
        return [s.epoch for s in samplers if isinstance(s, DistributedSampler) and s.shuffle]

    def _copies(self) -> dict[str, dict[str, list[float]]]:
        """Returns variables of the script that hold another copy of the weights, by their names."""
        own = set(map(id, self._parameters.values()))
        copies: dict[str, dict[str, list[float]]] = {}
        for name, value in _with_attributes(self._variables):
            weights = _weights_in(value, self._known)
            has_names_of_model = weights and weights.keys() <= self._parameters.keys()
            if has_names_of_model and own.isdisjoint(map(id, weights.values())):
                copies[name] = {key: sketch(_own_part(tensor)) for key, tensor in weights.items()}
        return copies


def _own_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor; the whole, gathered, if it is divided in more than one way."""
    if is_sharded(tensor) and len(_divided_dims(tensor)) > 1:
        gathered: Tensor = whole(tensor.detach())
        return gathered
    part: Tensor = local(tensor)
    return part


def _divided_dims(tensor: Any) -> list[tuple[int, int]]:
    """Returns the mesh dimensions by which a DTensor is divided, each with the dimension of the tensor."""
    divided = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_shard() and tensor.device_mesh.size(mesh_dim) > 1:
            divided.append((mesh_dim, placement.dim))
    return divided


def _place(tensor: Any) -> list[int] | None:
    """Returns the dimension along which a DTensor is divided, the number of parts and this rank's; None for whole tensors."""
    divided = _divided_dims(tensor) if is_sharded(tensor) else []
    if len(divided) != 1:
        return None
    mesh_dim, dim = divided[0]
    return [dim, tensor.device_mesh.size(mesh_dim), tensor.device_mesh.get_local_rank(mesh_dim)]


def _has_own_statistics(layer: nn.Module) -> bool:
    is_batch_norm = isinstance(layer, BatchNormBase) and not isinstance(layer, nn.SyncBatchNorm)
    return is_batch_norm and layer.training


def _with_attributes(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the variables of a script, and the attributes of objects of its own classes."""
    main = sys.modules.get("__main__")
    for name, value in variables.items():
        yield name, value
        of_script = type(value).__module__ in ("__main__", getattr(main, "__name__", "__main__"))
        if of_script and not isinstance(value, nn.Module):
            for attribute, inner in getattr(value, "__dict__", {}).items():
                yield f"{name}.{attribute}", inner


def _weights_in(value: object, known: set[int]) -> Mapping[str, Tensor]:
    """Returns the parameters in a module that is none of the models, or in a dict of tensors."""
    if isinstance(value, nn.Module):
        if id(value) in known or id(unwrap(value)) in known:
            return {}
        return {clean(name): parameter for name, parameter in unwrap(value).named_parameters()}
    if isinstance(value, dict) and value and all(isinstance(entry, Tensor) for entry in value.values()):
        return {clean(str(name)): entry for name, entry in value.items()}
    return {}


def _line() -> str:
    """Returns the line of the script that is running, such as "train.py:31"."""
    frame = user_frame()
    if frame is None:
        return "an unknown line"
    return f"{Path(frame.f_code.co_filename).name}:{line_of(frame)}"
