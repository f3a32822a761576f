"""The private side of FSDP2 (`torch.distributed.fsdp.fully_shard`).

    unit              a module that `fully_shard` was called on; public: `FSDPModule`
    parameter group   the parameters of a unit that are gathered and reduced together
    group parameter   one parameter of a group: its shard, and the whole (unsharded) parameter while that exists
    pending gradient  the gradient of a whole parameter that no communication has seen yet

Where torch keeps a pending gradient depends on the release. Up to 2.14 a backward pass without communication moves it,
in the dtype of the reduction, to `FSDPParam.unsharded_accumulated_grad`. From 2.15 on it stays in the whole parameter's
`.grad`, and that attribute only reads it. `pending_gradient` and `set_pending_gradient` are the same for both.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from paceline.torch_internals.dtensor import chunk
from paceline.torch_internals.replaced import replaced
from paceline.torch_internals.tensors import hook_gradient, hooks_before, is_users_hook

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


class _Chunks:
    """The chunks of a parameter, each of which becomes a view when it is asked for."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._num_chunks = num_chunks
        self._dim = dim

    def __getitem__(self, index: int) -> torch.Tensor:
        return chunk(self._tensor, self._num_chunks, index, self._dim)


@contextmanager
def own_chunks_only() -> Iterator[None]:
    """While it is open, `fully_shard` on n ranks makes no more views of a parameter than it uses: two, and not 2n.

    It chunks each parameter for all ranks, twice, and takes the first chunk and its own: about 40 ms a parameter at 16,384
    ranks, on each of them.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with replaced(_fsdp_param, "_chunk_with_empty", _Chunks):
        yield


def parameter_groups(unit: FSDPModule) -> list[FSDPParamGroup]:
    """Returns the parameter groups of one unit; an empty list if it has no parameters of its own."""
    return _groups_of(unit._get_fsdp_state())


def _groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # In torch 2.11 a unit has one group at most.
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def group_parameters(group: FSDPParamGroup) -> list[FSDPParam]:
    """Returns the parameters of a group, in the order in which they are packed for communication."""
    return list(group.fsdp_params)


def group_modules(group: FSDPParamGroup) -> tuple[nn.Module, ...]:
    """Returns the modules on which `fully_shard` was called for this group."""
    return tuple(group.modules)


def sharded_parameter(parameter: FSDPParam) -> nn.Parameter:
    """Returns this rank's shard as a DTensor: the parameter that the module has and the optimizer updates."""
    return parameter.sharded_param


def whole_parameter(parameter: FSDPParam) -> torch.Tensor | None:
    """Returns the whole parameter with which the module computes; None if it was never gathered.

    FSDP2 keeps the tensor after it reshards, and only frees its storage.
    """
    return getattr(parameter, "_unsharded_param", None)


def is_in_place(parameter: FSDPParam) -> bool:
    """Returns whether each module still holds the shard or the whole parameter under the name that it had.

    Inside `without_taking_up` others stand there on purpose.
    """
    if "reset_sharded_param" in vars(parameter):
        return True
    info = parameter._module_info
    places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    for module, name in places:
        held = module._parameters.get(name)
        if held is None or (held is not parameter.sharded_param and held is not whole_parameter(parameter)):
            return False
        # Between the passes a script may put a plain tensor in the place of a whole parameter. FSDP2 puts its shard back into
        # the table, but what the module reads is the attribute.
        if name in vars(module):
            return False
    return True


def is_called_with_another(parameter: FSDPParam) -> bool:
    """Returns whether `torch.func.functional_call` has put a tensor that is no parameter in the place of this one."""
    info = parameter._module_info
    held = info.module._parameters.get(info.param_name)
    return held is not None and not isinstance(held, nn.Parameter)


def gathered_dtype(parameter: FSDPParam) -> torch.dtype | None:
    """Returns the dtype that the shard had when FSDP2 made memory for the whole parameter; None if it was never gathered."""
    return None if whole_parameter(parameter) is None else parameter.orig_dtype


def parameter_name(parameter: FSDPParam) -> str:
    """Returns the name of a group parameter in the model."""
    return str(parameter._param_fqn or parameter._module_info.param_name)


def take_up_sharded_parameter(parameter: FSDPParam) -> None:
    """Makes FSDP2 use the parameter that now stands in the module in the place of the shard."""
    parameter.reset_sharded_param()


@contextmanager
def without_taking_up(parameters: Iterable[FSDPParam]) -> Iterator[None]:
    """Keeps `load_state_dict` from making FSDP2 look for the shards of these group parameters, inside the context."""
    silenced = list(parameters)
    for parameter in silenced:
        # The attribute of the object hides the method of its class, until it is deleted.
        parameter.reset_sharded_param = lambda: None
    try:
        yield
    finally:
        for parameter in silenced:
            del parameter.reset_sharded_param


# -- gradients -----------------------------------------------------------------------------------------------------------


# Groups while a schedule runs that splits their backward passes: torch's second half reads and writes the whole parameters'
# own gradients, between the passes of autograd.
SPLITTING: weakref.WeakSet[FSDPParamGroup] = weakref.WeakSet()


class WholeParameter(nn.Parameter):
    """A whole parameter that stands for its shard: what a script does with `data`, `grad`, `requires_grad` reaches the shard.

    Between a forward and a backward pass FSDP2 leaves whole parameters in the model, where a script expects the parameters that
    have the gradients. Within the backward pass, where FSDP2 and autograd use it, `grad` is the whole parameter's own.
    New values reach the shard when FSDP2 frees the whole parameter, see `carry_values`.
    """

    _parameter: weakref.ref[FSDPParam]
    _group: weakref.ref[FSDPParamGroup]
    # The tensor whose aliases `data` has given out since the parameter was gathered: it counts how often they were written.
    _given_out: torch.Tensor | None
    # The memory into which FSDP2 gathers, while `data = value` has put other memory in its place.
    _gathered: torch.Tensor | None

    def _shard(self) -> nn.Parameter | None:
        """Returns the shard for which this parameter stands at the moment."""
        parameter, group = self._parameter(), self._group()
        if parameter is None or group is None or group in SPLITTING:
            return None
        if group._training_state.name not in ("IDLE", "FORWARD"):
            return None
        return parameter.sharded_param

    @property
    def data(self) -> torch.Tensor:
        if self._shard() is None:
            return unnoticed(self)
        if self._given_out is None:
            self._given_out = unnoticed(self)
        # Unlike `data`, `detach` gives a tensor that counts writes together with its origin.
        return self._given_out.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        from torch.distributed.tensor import DTensor

        if self._shard() is not None and self._gathered is None:
            self._gathered = _PLAIN_DATA.__get__(self)
        if isinstance(value, DTensor):
            value = value.full_tensor()
        # Its aliases see the memory of before. That `data` was set counts as written already.
        self._given_out = None
        _PLAIN_DATA.__set__(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        own = own_gradient(self)
        shard = self._shard() if own is None else None
        return own if shard is None else shard.grad

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        from torch.distributed.tensor import DTensor

        shard = self._shard()
        if shard is not None:
            shard.grad = None
            if isinstance(gradient, DTensor):
                shard.grad = gradient
                gradient = None
        _set_own_gradient(self, gradient)

    @property
    def requires_grad(self) -> bool:
        requires_grad: bool = _PLAIN_REQUIRES_GRAD.__get__(self)
        return requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        shard = self._shard()
        if shard is not None:
            shard.requires_grad = requires_grad
        _PLAIN_REQUIRES_GRAD.__set__(self, requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.requires_grad = requires_grad
        return self

    # The gradient of this parameter is that of this rank's samples. Hooks of the script's wait for the mean, at the shard.
    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        return _PLAIN_REGISTER_HOOK(self._shard_or_self(), hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        return _PLAIN_REGISTER_LATER_HOOK(self._shard_or_self(), hook)

    def _shard_or_self(self) -> nn.Parameter:
        shard = self._shard()
        return self if shard is None else shard


def shard_behind(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the shard for which a whole parameter stands between the passes; any other parameter as it is."""
    return parameter._shard_or_self() if isinstance(parameter, WholeParameter) else parameter


def _stand_for_shard(parameter: FSDPParam, group: FSDPParamGroup) -> None:
    """Makes the whole parameter of a group parameter a `WholeParameter`."""
    whole = parameter._unsharded_param
    # A subclass of the user's stays as it is.
    if type(whole) is nn.Parameter:
        whole._parameter = weakref.ref(parameter)
        whole._group = weakref.ref(group)
        whole._given_out = None
        whole._gathered = None
        whole.__class__ = WholeParameter


def carry_values(
    group: FSDPParamGroup, refuse: Callable[[FSDPParam], None], carried: Callable[[torch.Tensor], None]
) -> None:
    """Writes what a script has written into the whole parameters of a group into their shards, before FSDP2 frees them.

    A parameter was written if its version has changed since it was gathered, or that of a tensor that `data` has given out.
    The versions are the same on all ranks as long as these do the same.

    Args:
        group: the group, which was not gathered yet.
        refuse: raises an error; called for a parameter whose shard cannot take the values: it has another dtype or shape.
        carried: called with the whole values of which this rank's rows reach its shard.
    """
    # A unit is gathered, freed, or divided again over other ranks (a width for `reshard`).
    gathered: Callable[[], None] = group._to_unsharded
    freed: Callable[[], None] = group._to_sharded
    divided_again: Callable[[], None] = group._to_sharded_post_forward
    versions: dict[FSDPParam, tuple[int, ...]] = {}
    # What forward passes before a `data = value` have computed with, until the next forward pass: views that they have saved
    # see the memory of before, in which FSDP2 gathers again, and the parameter itself sees `value`.
    replaced: dict[FSDPParam, torch.Tensor] = {}

    def to_unsharded() -> None:
        gathered()
        if replaced:
            if group._training_state.name != "PRE_BACKWARD":
                replaced.clear()
            for parameter, before in replaced.items():
                whole = cast(WholeParameter, parameter._unsharded_param)
                whole._gathered = unnoticed(whole)
                _PLAIN_DATA.__set__(whole, whole._gathered.clone())
                whole._gathered.copy_(before)
        for parameter in group.fsdp_params:
            _stand_for_shard(parameter, group)
            versions[parameter] = _versions(parameter)

    def carry() -> None:
        if not group.is_unsharded:
            return
        written = [parameter for parameter in group.fsdp_params if versions.get(parameter) != _versions(parameter)]
        versions.clear()
        refused = [parameter for parameter in written if not _take_values(parameter, carried)]
        for parameter in group.fsdp_params:
            before = _forget_written(parameter)
            if before is not None:
                replaced.setdefault(parameter, before)
        for parameter in refused:
            refuse(parameter)

    def to_sharded() -> None:
        carry()
        freed()

    def to_sharded_post_forward() -> None:
        carry()
        divided_again()

    group._to_unsharded = to_unsharded
    group._to_sharded = to_sharded
    group._to_sharded_post_forward = to_sharded_post_forward


def unnoticed(whole: torch.Tensor) -> torch.Tensor:
    """Returns the values of a parameter, which may be a whole one: what is written into them does not reach its shard."""
    values: torch.Tensor = _PLAIN_DATA.__get__(whole)
    return values


def _versions(parameter: FSDPParam) -> tuple[int, ...]:
    """Returns how often the whole parameter, and each tensor that its `data` has given out, was written."""
    whole = parameter._unsharded_param
    if whole.is_inference():
        return ()
    if not isinstance(whole, WholeParameter):
        return (whole._version,)
    times_written = 0
    if whole._given_out is not None:
        times_written = whole._given_out._version
    return (whole._version, whole._gathered is not None, times_written)


def _forget_written(parameter: FSDPParam) -> torch.Tensor | None:
    """Makes a whole parameter what it was when it was gathered; returns a copy of its values if `data` was set since."""
    whole = parameter._unsharded_param
    if not isinstance(whole, WholeParameter):
        return None
    whole._given_out = None
    gathered = whole._gathered
    if gathered is None:
        return None
    _PLAIN_DATA.__set__(whole, gathered)
    whole._gathered = None
    return gathered.clone()


def _take_values(parameter: FSDPParam, carried: Callable[[torch.Tensor], None]) -> bool:
    """Copies this rank's rows of the whole parameter into its shard; returns False where that would not be exact."""
    shard = parameter._sharded_param_data
    whole = getattr(parameter._unsharded_param, "_local_tensor", parameter._unsharded_param)
    if len(parameter.all_gather_outputs) != 1 or whole.dtype != shard.dtype or whole.shape != parameter._orig_size:
        return False
    # FSDP2 divides rows here (dim 0), so that the shards of all ranks follow each other, and the last ones may have padding.
    rank = parameter.mesh_info.shard_mesh_rank
    with torch.no_grad():
        carried(unnoticed(whole))
        rows = whole.reshape(-1)[rank * shard.numel() : (rank + 1) * shard.numel()]
        shard[: rows.numel()].copy_(rows)
    return True


# The attributes that `WholeParameter` hides.
_PLAIN_DATA: Any = nn.Parameter.data
_PLAIN_GRADIENT: Any = nn.Parameter.grad
_PLAIN_REQUIRES_GRAD: Any = nn.Parameter.requires_grad
_PLAIN_REGISTER_HOOK: Any = nn.Parameter.register_hook
_PLAIN_REGISTER_LATER_HOOK: Any = nn.Parameter.register_post_accumulate_grad_hook


def own_gradient(whole: torch.Tensor) -> torch.Tensor | None:
    """Returns the gradient of a whole parameter itself, not the shard's."""
    own: torch.Tensor | None = _PLAIN_GRADIENT.__get__(whole)
    return own


def _set_own_gradient(whole: torch.Tensor, gradient: torch.Tensor | None) -> None:
    _PLAIN_GRADIENT.__set__(whole, gradient)


def pending_gradient(parameter: FSDPParam) -> torch.Tensor | None:
    """Returns the gradient of a group parameter that was not reduced yet, in the whole parameter's shape; or None."""
    if _accumulates_apart(parameter) and parameter.unsharded_accumulated_grad is not None:
        return parameter.unsharded_accumulated_grad
    whole = whole_parameter(parameter)
    return None if whole is None else own_gradient(whole)


def equalise_pending(group: FSDPParamGroup) -> None:
    """Gives the pending gradients of a group one dtype: that in which FSDP2 has accumulated earlier backward passes.

    A parameter that was frozen in those passes has the gradient of the last one only, in the dtype of the parameter.
    """
    apart = [parameter for parameter in group.fsdp_params if _accumulates_apart(parameter)]
    accumulated = [parameter.unsharded_accumulated_grad for parameter in apart]
    dtype = next((gradient.dtype for gradient in accumulated if gradient is not None), None)
    if dtype is None:
        return
    for parameter in apart:
        gradient = pending_gradient(parameter)
        if gradient is not None and gradient.dtype != dtype:
            set_pending_gradient(parameter, gradient.to(dtype))


def set_pending_gradient(parameter: FSDPParam, gradient: torch.Tensor | None) -> None:
    """Replaces the pending gradient of a group parameter; None clears it.

    Args:
        parameter: the group parameter, which was gathered at least once, unless `gradient` is None.
        gradient: the gradient, in the dtype in which FSDP2 accumulates, as `pending_gradient` returned it.
    """
    whole = whole_parameter(parameter)
    # Only one of the two places may have the gradient: FSDP2 adds them up after a backward pass.
    if _accumulates_apart(parameter):
        parameter.unsharded_accumulated_grad = gradient
        gradient = None
    if whole is not None:
        _set_own_gradient(whole, gradient)


def add_zero_gradient(parameter: FSDPParam) -> None:
    """Gives zeros as the gradient to a group parameter that the backward pass did not reach, so that it is reduced too."""
    whole = parameter._unsharded_param
    # From torch 2.15 on the gradient's dtype may differ from the parameter's: then it is that of the reduction.
    zeros = torch.zeros_like(whole, dtype=getattr(whole, "grad_dtype", None) or whole.dtype)
    _set_own_gradient(whole, zeros)


def _accumulates_apart(parameter: FSDPParam) -> bool:
    """Returns whether pending gradients have an attribute of their own, as up to torch 2.14."""
    return not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


# -- torch.autograd.grad -------------------------------------------------------------------------------------------------


def let_grad_find(parameter: FSDPParam) -> None:
    """Lets `torch.autograd.grad` follow a shard to the whole parameter, with which a forward pass has computed."""
    follow_shards()

    # A hook is what a tensor can keep for itself: an attribute would be pickled with it, and a tensor to which something refers
    # weakly cannot be converted.
    def unchanged(_: torch.Tensor) -> None:
        pass

    vars(unchanged)["group_parameter"] = weakref.ref(parameter)
    hook_gradient(parameter.sharded_param, unchanged)


@cache
def follow_shards() -> None:
    """Replaces `torch.autograd.grad` and `backward`, for this process. They do as before where no input is such a shard."""
    plain, plain_backward = torch.autograd.grad, torch.autograd.backward
    signature = inspect.signature(plain)

    @wraps(plain)
    def grad(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        inputs, wholes = _with_wholes(given["inputs"])
        allows_unused = given.get("allow_unused")
        if wholes:
            given["allow_unused"] = True
        gradients = plain(**{**given, "inputs": [*inputs, *wholes.values()]})  # an iterator was read above
        results = list(gradients[: len(inputs)])
        for number, given_input in enumerate(inputs):
            if isinstance(given_input, WholeParameter):
                results[number] = _changed_by_hooks(given_input, results[number])
        for number, gradient in zip(wholes, gradients[len(inputs) :], strict=True):
            gradient = _changed_by_hooks(inputs[number], gradient)
            # The script may have computed with the shard itself, too.
            if results[number] is None:
                results[number] = gradient
            elif gradient is not None:
                results[number] = results[number] + gradient
        if wholes and not allows_unused and any(result is None for result in results):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this "
                "is the desired behavior."
            )
        return tuple(results)

    @wraps(plain_backward)
    def backward(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("inputs") is not None:
            inputs, wholes = _with_wholes(kwargs["inputs"])
            kwargs["inputs"] = [*inputs, *wholes.values()]
        plain_backward(*args, **kwargs)

    torch.autograd.grad, torch.autograd.backward = grad, backward


def _with_wholes(inputs: Any) -> tuple[list[Any], dict[int, torch.Tensor]]:
    """Returns inputs, and for the numbers of some of them the whole parameters that were computed with in their places."""
    inputs = [inputs] if isinstance(inputs, torch.Tensor | GradientEdge) else list(inputs)
    wholes = {number: _whole_of(given_input) for number, given_input in enumerate(inputs)}
    return inputs, {number: whole for number, whole in wholes.items() if whole is not None}


def _whole_of(tensor: torch.Tensor | GradientEdge) -> torch.Tensor | None:
    if isinstance(tensor, GradientEdge):
        return None  # a place in the graph, as schedules of pipelines give
    for hook in hooks_before(tensor):
        parameter = getattr(hook, "group_parameter", lambda: None)()
        if parameter is not None:
            return whole_parameter(parameter)
    return None


def _changed_by_hooks(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Calls the script's hooks, which stand on the shard, with the gradient of the whole parameter."""
    for hook in filter(is_users_hook, hooks_before(shard_behind(parameter))):
        changed = None if gradient is None else hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


# -- passes --------------------------------------------------------------------------------------------------------------


def left_unfinished(root: FSDPModule) -> bool:
    """Returns whether an exception ended the last forward or backward pass of this root midway."""
    context = root._get_fsdp_state()._state_ctx
    return context.iter_forward_root is not None or context.post_backward_final_callback_queued


def reset_unfinished(root: FSDPModule) -> None:
    """Makes a root ready for the next forward pass after an exception ended the last pass midway.

    Newer releases of torch do this in the public `FSDPModule.reset_iter_state`; torch 2.11 does not have it.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = root._get_fsdp_state()
    context = state._state_ctx
    communication = state._comm_ctx
    # Collectives of the interrupted pass may still use the tensors that are released below. Waiting for the whole device
    # takes the place of waiting for the event of each of them.
    if state._device.type != "cpu":
        torch.accelerator.synchronize(state._device)
    communication.all_gather_state = communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for member in context.all_states:
        member._modules_to_run_forward.clear()
        member._training_state = TrainingState.IDLE
        for group in _groups_of(member):
            group.finalize_backward()
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def call_around_final_callback(
    units: Iterable[FSDPModule], before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> None:
    """Calls functions at the end of each backward pass: before FSDP2 ends it and waits for the last gradients, and after."""

    def wrapped(final: Callable[[], None]) -> Callable[[], None]:
        def call_all() -> None:
            if before is not None:
                before()
            final()
            if after is not None:
                after()

        return call_all

    # Whichever unit autograd reaches first queues its own method, so that all of them are wrapped.
    for unit in units:
        state: Any = unit._get_fsdp_state()
        state._root_post_backward_final_callback = wrapped(state._root_post_backward_final_callback)


def reduce_pending(root: FSDPModule, groups: Iterable[FSDPParamGroup]) -> None:
    """Reduces pending gradients outside of a backward pass, group by group, and waits for all reductions.

    Ranks: all of the mesh, with their groups in the same order.
    """
    state = root._get_fsdp_state()
    state._lazy_init()  # a run that was resumed may have had no forward pass yet
    for group in groups:
        group.post_backward()
    # torch 2.15 sets this flag at the start of a backward pass and reads it at the end. Here no pass has started, so that it
    # may still be None.
    if getattr(state._state_ctx, "manual_backward_finalization_active", False) is None:
        state._state_ctx.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def replace_communication(group: FSDPParamGroup, gather: AllGather, scatter: ReduceScatter) -> None:
    """Makes a group communicate through objects of Paceline.

    Args:
        group: the group of parameters that these objects gather and reduce.
        gather, scatter: instances of classes that derive from those of `communication_classes`.
    """
    # `set_custom_all_gather` is public, but it sets one object for all groups of a unit. Each object of Paceline belongs to
    # one group.
    group._all_gather_comm = gather
    group._reduce_scatter_comm = scatter


def call_before_reduction(group: FSDPParamGroup, callback: Callable[[list[FSDPParam]], None]) -> None:
    """Calls `callback` with the parameters of a group before their gradients are reduced; not after passes that are held."""
    plain = group.post_backward

    def post_backward(*unused: object) -> None:
        if group.reduce_grads:
            callback(group_parameters(group))
        plain(*unused)

    group.post_backward = post_backward


def call_after_accumulation(whole: torch.Tensor, callback: Callable[[torch.Tensor], None]) -> None:
    """Calls `callback` with a whole parameter after autograd has accumulated into its own gradient."""
    _PLAIN_REGISTER_LATER_HOOK(whole, callback)


def call_before_gathering(group: FSDPParamGroup, callback: Callable[[], None]) -> None:
    """Calls `callback` whenever FSDP2 is about to gather a group's parameters, unless they are there already.

    What gathers them, see `replace_communication`, runs without gradients: the caller's mode can be seen here only.
    """
    plain = group.unshard

    def unshard(async_op: bool = False) -> None:
        is_under_way = group._all_gather_result is not None
        if not is_under_way and not group.is_unsharded:
            callback()
        plain(async_op)

    group.unshard = unshard


def communication_of(group: FSDPParamGroup) -> tuple[AllGather, ReduceScatter]:
    """Returns the objects that gather a group's parameters and reduce-scatter its gradients."""
    return group._all_gather_comm, group._reduce_scatter_comm


def communication_classes() -> tuple[type[AllGather], type[ReduceScatter]]:
    """Returns the base classes of objects that gather parameters, and of those that reduce-scatter gradients."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    return AllGather, ReduceScatter
