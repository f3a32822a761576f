"""`PipelineModule`: layers that run one after the other, which our pipeline strategy divides into stages.

    layers     specs, modules and plain functions -> children "0", "1", ... of one module, whose forward runs them all
    parts      with which of them stages begin (`partition`)
    values     on each rank those of its own stage; the same numbers at every number of stages

How a rank comes by its stage without holding the whole model: where `seed_layers` is off, every rank builds layer after
layer, as one process would, so that random draws come in the same order, and gives up each one that belongs to another
stage before it builds the next. With `seed_layers`, each layer has a seed of its own, and those of other stages are built
on the meta device: nothing is drawn or stored. What is given up keeps its names and shapes, so that all ranks plan alike.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.base.errors import PlanError, PrepareError
from paceline.base.log import logger, warn_once
from paceline.world.world import World
from paceline_deepspeed import partition
from paceline_deepspeed.layers import Function, Tied, give_up, sharing, tie, trim
from paceline_deepspeed.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from paceline_large.pipeline.timing import measure_blocks

# The reentrant variant computes no gradients where no input requires one, as with the token ids of a first layer.
_checkpoint = partial(checkpoint, use_reentrant=False)


class LayerSpec:
    """A layer that is built where it is needed.

    Args:
        typename: its class, an `nn.Module`.
        module_args, module_kwargs: what it is built with.

    Raises:
        PrepareError: `pipe-layer`.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise PrepareError(
                "pipe-layer",
                "LayerSpec only supports torch.nn.Module types.",
                why=f"it was given {typename!r}",
                fix="pass the class, not an object: LayerSpec(nn.Linear, 4, 8); a function may stand in the list as it is",
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        arguments = [self.typename.__name__, *map(repr, self.module_args)]
        arguments += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"LayerSpec({', '.join(arguments)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its weights with all others of its key.

    Args:
        key: name of the group.
        typename: see `LayerSpec`. Layers of one class share all parameters, of others those in `tied_weight_attr`.
        forward_fn: called with the layer and its input in place of the layer's own forward.
        tied_weight_attr: names of the weights that are shared.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        if isinstance(tied_weight_attr, str):
            tied_weight_attr = [tied_weight_attr]
        self.tied_weight_attr = list(tied_weight_attr)


class PipelineModule(nn.Module):
    """Layers in order, and where the stages of a pipeline begin.

    Args:
        layers: specs, modules, or functions of one argument; a layer takes what the one before gave, a tensor or a tuple.
        num_stages: how many; it must divide the number of processes. One process runs all stages.
        topology: in its place; axes pipe and data.
        loss_fn: called with the last layer's output and the labels; None takes the output for the loss.
        seed_layers: each layer is built under a seed of its own, `base_seed` + its number.
        seed_fn: sets that seed; None seeds torch, numpy and random.
        partition_method: see `partition`; or the numbers of the layers with which the second and later stages begin.
        activation_checkpoint_interval: layers whose activations are computed again together; 0: none.
        activation_checkpoint_func: called with a function and its inputs.
        checkpointable_layers: names of the classes for which that is done; None: all that have parameters.
        dynamic_shape: has no effect: shapes may always change.
        example_inputs: for partition_method "profile": what the first layer takes. None takes a batch of the training data.

    Attributes:
        parts: numbers of the layers with which stages begin, and the number of layers; None until it is measured.
        num_stages, stage_id: how many stages, and this rank's.

    Raises:
        PlanError, CompatError, PrepareError: `pipe-stages`, `pipe-topology`, `pipe-method`, `pipe-no-layer`, `pipe-empty`,
            `pipe-layer`.
    """

    pipeline_apart: bool  # read by `plan.facts` and `parallel.stages`

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = _checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        example_inputs: Any = None,
    ) -> None:
        super().__init__()
        self._topology = _topology(num_stages, topology, World.detect().size)
        grid = PipelineParallelGrid(self._topology)
        self.num_stages = grid.pipe_parallel_size
        self.stage_id = grid.stage_id
        self._layer_specs = [_checked(layer) for layer in layers]
        self._classes = [_class_of(layer) for layer in self._layer_specs]
        self.loss_fn = loss_fn
        self.seed_layers = seed_layers
        self.base_seed = base_seed
        self.seed_fn = seed_fn or _seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.example_inputs = example_inputs
        self._first = 0  # the layer with which a pass begins
        self._finish: Callable[[Any], Any] | None = None
        self.parts = self._parts(partition_method)
        self.pipeline_apart = self.num_stages > 1 and self.parts is not None
        self._build()

    # -- the stages --------------------------------------------------------------------------------------------

    def _parts(self, method: str | Sequence[int]) -> list[int] | None:
        """Numbers of the layers with which stages begin, and the number of layers; None where layers are measured first.

        Raises:
            PlanError: `pipe-empty`.
        """
        count = len(self._layer_specs)
        stages = self.num_stages
        word = method.lower() if isinstance(method, str) else None
        if stages == 1 and word in (None, "profile"):
            # One process runs all layers: given beginnings of stages have no effect, and there is nothing to measure.
            parts = [0, count]
        elif word is None:
            parts = [0, *map(int, method), count]
        elif word == "profile" and count >= stages:
            return None
        elif word in ("profile", "uniform"):  # "profile" with fewer layers than stages is refused below
            parts = partition.uniform(count, stages)
        elif word == "parameters":
            parts = self._balanced(self._elements(), method)
        elif word.startswith("type:"):
            parts = self._balanced(partition.matches(str(method), self._classes), method)
        else:
            raise partition.unknown(str(method))
        # Two equal beginnings, or one out of order, would leave a stage without layers.
        if len(parts) != stages + 1 or sorted(set(parts)) != parts:
            example = partition.uniform(max(count, stages), stages)[1:-1]
            raise PlanError(
                "pipe-empty",
                f"{count} layers do not make {stages} stages with layers in each.",
                why=f"partition_method={method!r} begins stages with layers {parts[:-1]}, of {count}",
                fix="use fewer stages, or give the layers with which the second and later stages begin: "
                f"partition_method={list(example)}",
            )
        return parts

    def _balanced(self, weights: list[int], method: object) -> list[int]:
        """DeepSpeed's division of layers of such weights; says so where another one is lighter."""
        parts = partition.balanced(weights, self.num_stages)
        has_empty_stage = len(set(parts)) != self.num_stages + 1
        if not has_empty_stage:  # `_parts` refuses one, so there is nothing to compare
            better = partition.lighter(weights, parts)
            if better and World.detect().is_main:
                logger("compat").info("PipelineModule: partition_method=%r gives %s; %s", method, parts, better)
        return parts

    def _elements(self) -> list[int]:
        """Elements that train, of each layer."""
        counts = []
        for spec in self._layer_specs:
            layer = spec
            if isinstance(spec, LayerSpec):
                layer = _outline(spec)
            count = 0
            # A plain function has no parameters.
            if isinstance(layer, nn.Module):
                for parameter in layer.parameters():
                    if parameter.requires_grad:
                        count += parameter.numel()
            counts.append(count)
        return counts

    def measure(self, inputs: object) -> list[float]:
        """Seconds that each layer takes forward and backward, for partition_method "profile". Ranks: no communication."""
        return measure_blocks(self, self.layer_names, inputs)

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers among the modules."""
        return [str(number) for number in range(len(self._layer_specs))]

    @property
    def forward_funcs(self) -> list[nn.Module]:
        """The layers; those of other stages have no values."""
        return [self.get_submodule(name) for name in self.layer_names]

    def topology(self) -> ProcessTopology:
        return self._topology

    def mpu(self) -> PipelineParallelGrid:
        """Returns the topology with this rank's place in it."""
        return PipelineParallelGrid(self._topology)

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def stage_owner(self, layer_idx: int) -> int:
        assert self.parts is not None, "known once the layers were measured"
        return next(stage for stage, end in enumerate(self.parts[1:]) if layer_idx < end)

    # -- its layers --------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Builds and registers all layers; gives up the values of other stages."""
        # Without parts the layers are yet to be measured, and every rank needs all of them.
        own_keys: set[str] = set()  # of tied layers, of which this rank needs the values
        for number, spec in enumerate(self._layer_specs):
            if isinstance(spec, TiedLayerSpec) and self._is_own(number):
                own_keys.add(spec.key)
        first_of_key: dict[str, nn.Module] = {}
        used_modules: set[int] = set()
        random_state = torch.get_rng_state()
        own_layers: list[nn.Module] = []
        other_layers: list[nn.Module] = []
        for number, spec in enumerate(self._layer_specs):
            is_own = self._is_own(number)
            if self.seed_layers:
                self.seed_fn(int(self.base_seed) + number)
            if isinstance(spec, TiedLayerSpec):
                layer = self._tied(spec, first_of_key, spec.key in own_keys)
            elif isinstance(spec, LayerSpec):
                layer = self._built(spec, is_own)
            elif isinstance(spec, nn.Module):
                # The user's own module keeps its values, and may stand in the list twice, in two stages. `give_up`
                # takes tensors out of the module that is registered, so elsewhere that is a twin with the same tensors.
                if is_own and id(spec) not in used_modules:
                    layer = spec
                else:
                    layer = sharing(spec)
                used_modules.add(id(spec))
            else:
                layer = Function(spec)
            self.add_module(str(number), layer)
            if is_own:
                own_layers.append(layer)
            else:
                other_layers.append(layer)
        if self.seed_layers:
            torch.set_rng_state(random_state)  # ranks have drawn differently
        # Only now, because a later layer of this stage may share the weights of an earlier one of another stage.
        give_up(other_layers, own_layers)

    def _is_own(self, number: int) -> bool:
        """Whether a layer belongs to this rank's stage."""
        return self.parts is None or self.stage_owner(number) == self.stage_id

    def _built(self, spec: LayerSpec, with_values: bool) -> nn.Module:
        """Builds the layer of a spec; without values it has names and shapes alone."""
        if with_values:
            return spec.build()
        if self.seed_layers:
            return _outline(spec)
        # Built all the same: what it draws, the layers after it must not draw.
        layer = spec.build()
        give_up([layer], [])
        trim()
        return layer

    def _tied(self, spec: TiedLayerSpec, first_of_key: dict[str, nn.Module], with_values: bool) -> nn.Module:
        """Builds the layer of a spec, which shares its weights with the first layer of its key."""
        first = first_of_key.get(spec.key)
        if first is None:
            layer = self._built(spec, with_values)
            first_of_key[spec.key] = layer
        elif type(first) is spec.typename:
            layer = sharing(first)
        else:
            layer = self._built(spec, with_values)
            tie(layer, first, spec.tied_weight_attr, spec.key)
        if spec.forward_fn is None:
            return layer
        return Tied(layer, spec.forward_fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PipelineModule:
        """Moves and converts what is here; what is not keeps its place, and changes its dtype alone."""

        def convert(tensor: Tensor) -> Tensor:
            if not (tensor.is_meta and self.pipeline_apart):
                return fn(tensor)
            # A tensor of another stage is on meta and cannot be moved; an empty tensor shows to which dtype `fn` converts.
            example = fn(torch.empty(0, dtype=tensor.dtype))
            return tensor.to(example.dtype)

        super()._apply(convert, recurse)  # type: ignore[no-untyped-call]
        return self

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Takes the values of this rank's stage; a state of the whole model may be given."""
        with warnings.catch_warnings():
            # torch warns that parameters on meta take no values, which is what is meant for those of other stages.
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter.*")
            return super().load_state_dict(state_dict, strict, assign)

    # -- a pass ------------------------------------------------------------------------------------------------

    @contextmanager
    def pipeline_begin(self, number: int) -> Iterator[None]:
        """Makes `forward` begin with layer `number` inside; see `parallel.stages`."""
        before = self._first
        self._first = number
        try:
            yield
        finally:
            self._first = before

    @contextmanager
    def finishing(self, finish: Callable[[Any], Any] | None) -> Iterator[None]:
        """Makes `forward` return inside what `finish` makes of the last layer's output."""
        before = self._finish
        self._finish = finish
        try:
            yield
        finally:
            self._finish = before

    def forward(self, forward_input: object) -> Any:
        """Runs all layers in order; inside of a pipeline those of a stage.

        Raises:
            PlanError: `pipe-unprepared`.
        """
        hidden = forward_input
        for begin, end in self._spans():
            layers = [self._modules[str(number)] for number in range(begin, end)]
            if self._recomputed(layers, begin):
                inputs = hidden if isinstance(hidden, tuple) else (hidden,)
                hidden = self.activation_checkpoint_func(partial(_run, layers), *inputs)
            else:
                hidden = _run(layers, hidden)
        if self._finish is None:
            return hidden
        return self._finish(hidden)

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Layers that are computed again together: up to so many, never of two stages."""
        for begin, end in pairwise(self.parts or [0, len(self._layer_specs)]):
            size = self.activation_checkpoint_interval or end - begin
            # A stage's own pass begins at its first layer (`pipeline_begin`), so the spans of earlier stages are empty.
            for start in range(max(begin, self._first), end, size):
                yield start, min(start + size, end)

    def _recomputed(self, layers: Sequence[Any], begin: int) -> bool:
        """Whether such layers, of which the first has the number `begin`, compute their activations again.

        Raises:
            PlanError: `pipe-unprepared`, where this rank has not built them.
        """
        parameters: list[nn.Parameter] = []
        for layer in layers:
            parameters += layer.parameters()
        if self.pipeline_apart and any(parameter.is_meta for parameter in parameters):
            raise PlanError(
                "pipe-unprepared",
                f"layer {begin} of the pipeline was called on a rank that has built stage {self.stage_id} alone.",
                why=f"{self.num_stages} stages begin with layers {(self.parts or [])[:-1]}",
                fix="pass the module to `deepspeed.initialize`, and train with `engine.train_batch()`",
            )
        if not (self.activation_checkpoint_interval and parameters and torch.is_grad_enabled()):
            return False
        if self.checkpointable_layers is None:
            return True
        classes = self._classes[begin : begin + len(layers)]
        return all(name in self.checkpointable_layers for name in classes)


def _run(layers: Sequence[Any], *inputs: Any) -> Any:
    # A recomputed function takes its inputs one by one; a layer takes one value, which may be a tuple.
    hidden: Any = inputs
    if len(inputs) == 1:
        hidden = inputs[0]
    for layer in layers:
        hidden = layer(hidden)
    return hidden


def _outline(spec: LayerSpec) -> nn.Module:
    """Builds a spec's layer without values, on the meta device: nothing is drawn.

    A layer that cannot be built there is built as usual, and its values are given up.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                layer = spec.build()
        except RuntimeError:  # its constructor asks for values
            layer = spec.build()
    give_up([layer], [])
    return layer


def _seed(seed: int) -> None:
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _checked(layer: object) -> Any:
    if isinstance(layer, (LayerSpec, nn.Module)) or (callable(layer) and not isinstance(layer, type)):
        return layer
    raise PrepareError(
        "pipe-layer",
        f"a layer of a PipelineModule cannot be {layer!r}.",
        why="layers are LayerSpecs, modules, or functions of one argument",
        fix="write LayerSpec(Class, arguments...), or build the module",
    )


def _class_of(layer: object) -> str:
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return getattr(layer, "__name__", "")


def _topology(stages: int | None, topology: ProcessTopology | None, world: int) -> ProcessTopology:
    """Returns the topology for some arguments: axes pipe and data, whose product is the number of processes."""
    if topology is not None:
        return _usable(topology, world)
    if stages is None:
        raise PlanError(
            "pipe-stages",
            "must provide num_stages or topology",
            why="a PipelineModule is divided into stages",
            fix="write PipelineModule(layers, num_stages=2, ...)",
        )
    if world == 1 and stages > 1:
        warn_once(
            "compat",
            f"PipelineModule: num_stages={stages}, but there is 1 process, which runs all stages; the numbers are the "
            f"same. Launch with `paceline deepspeed --num_gpus {stages}` to divide the layers.",
        )
        stages = 1
    if stages < 1 or world % stages:
        divisors = [str(number) for number in range(1, world + 1) if world % number == 0]
        raise PlanError(
            "pipe-stages",
            f"num_stages ({stages}) must divide distributed world size ({world})",
            why=f"each stage is held by as many ranks: {world} / {stages}",
            fix=f"launch a multiple of {max(stages, 1)} processes, or use one of {', '.join(divisors)} stages",
        )
    return PipeDataParallelTopology(stages, world // stages)


def _usable(topology: ProcessTopology, world: int) -> ProcessTopology:
    """Checks that a plan can follow a topology, and returns it.

    Raises:
        PlanError: `pipe-topology`, where its ranks do not lie as those of a plan do.
    """
    used = [axis for axis in topology.get_axis_names() if topology.get_dim(axis) > 1]
    if topology.world_size() != world:
        why = f"it has {topology.world_size()} ranks, and there are {world} processes"
        fix = f"launch {topology.world_size()} processes, or make its dims multiply to {world}"
    elif not set(used) <= {"pipe", "data"}:
        why = f"its axes are {topology.get_axis_names()} with dims {topology.dims}"
        fix = "use PipeDataParallelTopology, and let the plan divide layers: `tensor_parallel: {autotp_size: ...}`"
    elif used == ["data", "pipe"]:
        why = "in it the ranks of a replica are neighbours; here those of a stage are: rank = pipe * replicas + data"
        fix = f"use PipeDataParallelTopology(num_pp={topology.get_dim('pipe')}, num_dp={topology.get_dim('data')})"
    else:
        return topology
    raise PlanError(
        "pipe-topology", f"a pipeline cannot be laid out so: {topology.get_axis_names()}.", why=why, fix=fix
    )
