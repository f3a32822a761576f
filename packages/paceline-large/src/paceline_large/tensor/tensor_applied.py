"""What `tensor` does to a model: each rank holds a part of the matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.base.errors import PlanError, TrainError
from paceline.parallel.data.averages import broadcast_tensors
from paceline.parallel.data.division import step_by_owners
from paceline.parallel.divided_parameters import refuse_tools, take_whole_values, whole_parameters
from paceline.parallel.mixtures import divide_gradient
from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.parallel.whole_answers import answer_for_whole_tensors
from paceline.plan.fqn import inside, parent, within_some
from paceline.plan.plan import Decision
from paceline.torch_internals.modules import parameter_table
from paceline.world.forward import override_forward
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import is_sharded
from paceline_large.hooks_on_parts import ALL_HOOKS, ON_INPUTS, ON_OUTPUTS, HooksOnParts
from paceline_large.random_streams import RandomStreams
from paceline_large.removed_parameters import refuse_removed
from paceline_large.same_inputs import SameInputs
from paceline_large.tensor import styles
from paceline_large.tensor.names import GROUPS, HEADS, KV_HEADS, LOCAL_HEADS, LayerGroup, shape
from paceline_large.tensor.options import TensorOptions
from paceline_large.tensor.plan import (
    DIVIDED,
    SHARED,
    shares_heads,
)
from paceline_large.tensor.proof import Proof, whole_counts
from paceline_large.tensor.tensor import division_of, experts_over_ep
from paceline_large.torch_internals.hooks import is_transformed
from paceline_large.torch_internals.loss_parallel import divide_losses_for


def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """Divides the parameters, with the values of the first tensor-parallel rank. Ranks: all."""
    regions = _Divider(model, context).run()
    take_whole_values(model)
    refuse_removed(model)
    refuse_tools()
    answer_for_whole_tensors()
    for parameter in model.parameters():
        if is_sharded(parameter):
            divide_gradient(parameter)
    # The inputs of a later stage of a pipeline are computed, and may be divided.
    if context.plan.layout.pp == 1 and context.runtime.others_answer:
        SameInputs(model, "tp", context.collectives.over(context.mesh.along("tp").get_group()))
    model.register_forward_pre_hook(_refuse_transforms, prepend=True)
    return DividedLayers(model, regions, context)


def _refuse_transforms(model: nn.Module, _: object) -> None:
    """A forward pre-hook.

    Raises:
        TrainError: `tensor-transform`.
    """
    if is_transformed():
        raise TrainError(
            "tensor-transform",
            f"{type(model).__name__} was called by a transform of `torch.func`, or with forward derivatives.",
            why="tp divides its layers, and the sums over ranks between them have no rule for `vmap`, `grad` or `jvp`",
            fix="use plan={'replicate': 'auto'}, under which every rank holds whole layers",
        )


class DividedLayers(AppliedStrategy):
    """A model whose matrices are divided.

    Args:
        model: after the division.
        regions: its attentions and MLPs.
        context: of the strategy.
    """

    def __init__(self, model: nn.Module, regions: list[styles.Region], context: Context) -> None:
        super().__init__(model)
        self._regions = regions
        self._context = context

    def bind(self, adapter: OptimizerAdapter) -> list[Decision]:
        """Lets an optimizer that may look at whole parameters step each on its owner; LBFGS steps DTensors."""
        optimizer = adapter.optimizer
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.register_load_state_dict_post_hook(_replicate_states)
            return []
        # Otherwise `shard` does it, whose ranks hold parts of the same parameters.
        if self._context.plan.fully_sharded:
            return []
        return step_by_owners(adapter, self.module, self._context.mesh.along(("ep", "tp")))

    @contextmanager
    def full_parameters(self, writeback: bool) -> Iterator[None]:
        """While it is open, parameters are unsharded and modules have the numbers of heads of the whole model."""
        with whole_parameters(self.module, writeback), whole_counts(self._regions):
            yield


def _replicate_states(optimizer: Optimizer) -> None:
    """Makes DTensors of the vectors over all parameters that LBFGS keeps; a checkpoint has them as plain tensors."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = next(parameter for parameter in parameters_of(optimizer) if is_sharded(parameter)).device_mesh

    def replicated(value: object) -> object:
        if isinstance(value, list):
            return [replicated(item) for item in value]
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or is_sharded(value):
            return value
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)

    for state in optimizer.state.values():
        state.update({key: replicated(value) for key, value in state.items()})


class _Divider:
    """Divides one model over the tensor-parallel ranks.

    Ranks: all tensor-parallel peers construct and run it, with the same model.
    """

    def __init__(self, model: nn.Module, context: Context) -> None:
        self.model = model
        self.context = context
        self.options: TensorOptions = context.options
        self.mesh = context.mesh.along("tp")
        self.group = self.mesh.get_group()
        self.width = context.plan.layout.tp
        self.division = division_of(context.plan, context.facts, self.options)
        self.experts = experts_over_ep(context.plan, context.facts)
        self.modules = dict(model.named_modules())  # a pipeline stage lacks some
        self.layers = {layer.name: layer for layer in context.facts.layers if layer.name in self.modules}
        self.streams = RandomStreams(dist.get_rank(self.group), context.device)
        self.sequence = self.options.sequence or "sequence" in self.division.styles.values()
        self.regions: list[styles.Region] = []
        self.region_of_module: dict[str, styles.Region] = {}
        self.proofs: dict[Any, Proof] = {}  # by class and layers

    def run(self) -> list[styles.Region]:
        """Divides the model. Returns the regions of its attentions and MLPs."""
        self._broadcast()
        outer = self._regions()
        self._parameters()
        # After the parameters, because it looks at which of them are DTensors and stay replicated.
        self._undivided()
        # A proof wraps the forward of a module around divided layers, so it comes after these layers have got theirs.
        for name, group, region in outer:
            self._prove(name, group, region)
        if self.sequence:
            self._positions({name for name, _, _ in outer})
        if self.options.loss and self.division.head in self.modules:
            divide_losses_for(self.model)
        return self.regions

    def _broadcast(self) -> None:
        """Broadcasts buffers, parameters that stay plain tensors, and the state of the random number generators."""
        tensors: list[torch.Tensor] = list(self.model.buffers())
        for name, module in self.modules.items():
            if self._stays_plain(name, module):
                tensors += [parameter.detach() for parameter in module.parameters(recurse=False)]
        broadcast_tensors([tensor for tensor in tensors if not tensor.is_meta], self.group)
        self.streams.share(self.group)
        # The fast path of torch's encoder, taken in evaluation, hands the parameters of its children to one operation,
        # past their forward. These two attributes are what it asks before it takes that path.
        for module in self.model.modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False

    def _stays_plain(self, name: str, module: nn.Module) -> bool:
        """Returns whether the parameters of a module do not become DTensors on the `tp` mesh."""
        return _read_elsewhere(name, module) or within_some(name, self.experts)

    def _regions(self) -> list[tuple[str, LayerGroup, styles.Region]]:
        """Replaces the forward of each divided layer. Returns the modules around these layers."""
        outer = []
        for group in self.division.groups:
            if group.last not in self.layers:
                continue
            in_block = within_some(group.module, self.context.facts.blocks)
            region = styles.Region(self.group, self.streams, group.split, self.sequence and in_block)
            if group.split:
                region.numbers = self._numbers(group)
            region.count(whole=False)
            self.regions.append(region)
            self.region_of_module[group.attention or group.module] = region
            for name in group.first:
                forward = styles.colwise(region, self._is_transposed(name))
                if self.division.styles[name] == SHARED:
                    forward = styles.shared_heads(region, self._is_transposed(name), group.kv_heads)
                self._forward(name, forward)
            self._forward(group.last, styles.rowwise(region, self._is_transposed(group.last)))
            outer.append((group.module, group, region))
        # Divided layers in no group: the embedding of tokens and the head.
        alone = styles.Region(self.group, self.streams, False)
        grouped: set[str] = set()
        for group in self.division.groups:
            grouped.update((*group.first, group.last))
        for name, style in self.division.styles.items():
            if name not in self.layers or name in grouped:
                continue
            if style == "vocabulary":
                self._forward(name, styles.vocabulary(alone))
            elif style == "colwise_gather":
                mesh = None
                if self.options.loss and name == self.division.head:
                    mesh = self.mesh  # with it, logits stay divided
                self._forward(name, styles.head(alone, self._is_transposed(name), mesh))
        return outer

    def _forward(self, name: str, forward: Callable[..., Any]) -> None:
        override_forward(self.modules[name], "tensor_layer", forward)

    def _is_transposed(self, name: str) -> bool:
        return self.layers[name].role == "conv1d"

    def _numbers(self, group: LayerGroup) -> list[tuple[nn.Module, str, int, int]]:
        """Returns the attributes with numbers of heads, and of features in all heads, that an attention's code may use."""
        if not group.heads or group.attention not in self.layers:
            return []
        module = self.modules[group.attention]
        features = shape(self.layers[group.first[0]])[1]
        counts = []
        for name, value in self.layers[group.attention].numbers:
            counts_heads = name in (*HEADS, *KV_HEADS, *LOCAL_HEADS) and value in (group.heads, group.kv_heads)
            counts_groups = name in GROUPS and value == group.heads // group.kv_heads
            if counts_heads or value == features:
                # At least one: with fewer key-value heads than ranks, several ranks have the same one.
                counts.append((module, name, value, max(1, value // self.width)))
            elif counts_groups and shares_heads(group, self.width):
                counts.append((module, name, value, group.heads // self.width))
        return counts

    def _parameters(self) -> None:
        """Replaces parameters by DTensors with rank 0's values; parameters that modules share stay shared."""
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        # A parameter may belong to several modules, of which only one is divided. That module comes first and decides.
        divided_first = sorted(self.modules, key=lambda name: self.division.styles.get(name, "") not in DIVIDED)
        new_parameters: dict[int, nn.Parameter] = {}
        for name in divided_first:
            module = self.modules[name]
            if self._stays_plain(name, module):
                continue
            table = parameter_table(module)
            for key, parameter in table.items():
                if parameter is None or is_sharded(parameter):
                    continue
                if id(parameter) not in new_parameters:
                    dim = self._dim(name, parameter)
                    placement: Replicate | Shard = Replicate()
                    if dim is not None:
                        placement = Shard(dim)
                    # With None nothing is sent: a parameter on the meta device has no values yet.
                    source = None if parameter.is_meta else 0
                    divided = distribute_tensor(parameter.detach(), self.mesh, [placement], src_data_rank=source)
                    new_parameters[id(parameter)] = nn.Parameter(divided, requires_grad=parameter.requires_grad)
                table[key] = new_parameters[id(parameter)]

    def _dim(self, name: str, parameter: torch.Tensor) -> int | None:
        """Returns the dimension along which a parameter is divided; None if it is replicated."""
        style = self.division.styles.get(name, "")
        if style not in DIVIDED:
            return None
        is_rowwise = style.startswith("rowwise")
        if parameter.dim() == 1:
            # Every rank adds the whole bias of a rowwise layer, after the sum.
            return None if is_rowwise else 0
        # Weights are [features out, features in], and the other way round in transformers' `Conv1D`.
        dim_of_outputs = int(self._is_transposed(name))
        if is_rowwise:
            return 1 - dim_of_outputs
        return dim_of_outputs

    def _undivided(self) -> None:
        """Lets modules with replicated parameters, and the modules around them, see these parameters as plain tensors."""
        blocks = self.context.facts.blocks
        # Not the model itself: where layers at its top form a group, the blocks in it still divide positions.
        modules_of_groups = {group.module for group in self.division.groups} - {""}
        for name, module in self.modules.items():
            style = self.division.styles.get(name, "")
            if style in (*DIVIDED, SHARED) or not any(map(is_sharded, parameter_table(module).values())):
                continue
            partial: styles.Region | bool = style == "partial"
            if partial:
                # The group around it, which may turn out to be computed whole. Without one, the plan says so of itself.
                partial = self._region_of(name) or True
            if self.sequence and any(inside(name, block) for block in blocks):
                # Between attentions and MLPs each rank sees its share of the positions.
                partial = partial or not within_some(name, modules_of_groups)
            styles.mark(module, partial)
        for module in self.modules.values():
            if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
                continue  # torch's attention reads its weight, and does not call it
            reads = module is self.model or any(map(styles.marked, (module, *module.children())))
            if reads and type(module).forward is not nn.Module.forward:
                override_forward(module, "tensor_undivided", styles.undivided(self.group))

    def _region_of(self, name: str) -> styles.Region | None:
        """Returns the region of the attention or MLP in which a module is; None outside of all of them."""
        around = [module for module in self.region_of_module if inside(name, module)]
        if not around:
            return None
        return self.region_of_module[max(around, key=len)]

    def _prove(self, name: str, group: LayerGroup, region: styles.Region) -> None:
        """Lets the first forward pass of a group be compared with the undivided one; modules that are alike share a proof."""
        if not group.split or not hasattr(self.modules.get(name), "forward"):
            return
        module = self.modules[name]
        hooks = _inner_hooks(name, module, group)
        last = self.modules[group.last]
        # The same class with layers of the same names: the blocks of a model have the same code.
        layers = tuple(layer.removeprefix(name) for layer in (*group.first, group.last))
        key = (type(module).__name__, layers)
        # A model's own plan needs no proof: it was written together with its code. But not for shared key-value heads.
        is_known = self.division.source == "model" and not shares_heads(group, self.width)
        proof = self.proofs.setdefault(key, Proof(name, self.regions, done=is_known))
        proof.regions.append(region)

        def forward(self: nn.Module, original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
            if not proof.done:
                proof.run(self, last, region, original, args, kwargs)
            if region.split:
                hooks.look()
            return original(*args, **kwargs)

        override_forward(module, "tensor_proof", forward)

    def _positions(self, inner: set[str]) -> None:
        """Divides the positions of a sequence between the attentions and MLPs."""
        for name in sorted(inner):
            if any(inside(name, block) for block in self.context.facts.blocks):
                override_forward(self.modules[name], "tensor_inner", styles.whole_positions(self.group))
        hooks = HooksOnParts(
            "the positions of this process, because `sequence` divides them: what is computed of several positions, such as a "
            "penalty, is not that of one process. What comes before the first block and after the last one is whole."
        )

        def begin(positions: int) -> None:
            self._check_positions(positions)
            hooks.look()

        # Blocks of one list follow each other: the first one splits the positions, the last one gathers them. A model
        # with an encoder and a decoder has two such lists.
        stacks: dict[str, list[str]] = {}
        for block in self.context.facts.blocks:
            if block in self.modules:
                stacks.setdefault(parent(block), []).append(block)
        for blocks in stacks.values():
            for name in blocks:
                first, last = name == blocks[0], name == blocks[-1]
                forward = styles.block_positions(self.group, self.streams, first, last, begin)
                override_forward(self.modules[name], "tensor_block", forward)
                self._watch_positions(hooks, name, first, last)

    def _watch_positions(self, hooks: HooksOnParts, block: str, first: bool, last: bool) -> None:
        """Lets hooks on modules of a block that see a part of the positions be told of."""
        ends = {group.last for group in self.division.groups}
        inner = {group.module for group in self.division.groups}
        for name, module in self.modules[block].named_modules(prefix=block):
            kinds: tuple[str, ...] = ALL_HOOKS
            if name in ends or (name == block and first):
                kinds = ON_OUTPUTS
            elif name == block and last:
                kinds = ON_INPUTS
            elif within_some(name, inner - {name}):
                continue
            hooks.add(name, module, kinds)

    def _check_positions(self, positions: int) -> None:
        if positions % self.width:
            raise PlanError(
                "tensor-positions",
                f"a sequence of {positions} positions cannot be shared by {self.width} tensor-parallel ranks.",
                why=f"options.tensor.sequence with tp={self.width}",
                fix=f"pad sequences to {-(-positions // self.width) * self.width} positions, or leave `sequence` out",
            )


def _inner_hooks(module_name: str, module: nn.Module, group: LayerGroup) -> HooksOnParts:
    """Returns what tells of hooks between the divided layers of an attention or MLP."""
    hooks = HooksOnParts(
        "this process's share of the features, because `tp` divides the layers around it: what is computed of several "
        f"features, such as a penalty, is not that of one process. The output of {group.last} is whole, and so is the input "
        f"of {group.first[0]}."
    )
    for name, inner in module.named_modules(prefix=module_name):
        if name in group.first:
            hooks.add(name, inner, ON_OUTPUTS)
        elif name == group.last:
            hooks.add(name, inner, ON_INPUTS)
        # The module may be a whole block, with norms and an attention beside the layers of its MLP.
        elif name in group.partial or (inner is not module and next(inner.parameters(), None) is None):
            hooks.add(name, inner)
    return hooks


def _read_elsewhere(name: str, module: nn.Module) -> bool:
    """Returns whether other code than the module's forward reads its parameters, so that they must stay plain tensors.

    That is so for parts of computed weights (weight norm, parametrizations), for recurrent layers, which keep a flat list of
    their weights, and for lists of parameters.
    """
    # The endings are those of torch's `weight_norm` (`weight_g`, `weight_v`) and `spectral_norm` (`weight_orig`).
    is_part_of_weight = any(key.endswith(("_g", "_v", "_orig")) for key in parameter_table(module))
    if is_part_of_weight or "parametrizations" in name:
        return True
    # A module without a forward of its own is a list of parameters, or a container.
    return isinstance(module, nn.RNNBase) or type(module).forward is nn.Module.forward
