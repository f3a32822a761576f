"""What a plan needs to know of a model: plain numbers and names, so that planning stays pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import unwrap
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.base.ours import is_our_module
from paceline.base.registry import Registry
from paceline.plan.blocks import is_sequence, repeated_blocks
from paceline.world.sharded import plain_tensors

if TYPE_CHECKING:
    import torch

    from paceline.plan.experts import Experts

FACTS = Registry("paceline.model_facts", "fact about models")

T = TypeVar("T")
Row = TypeVar("Row")

# The function of transformers for the loss that balances experts.
BALANCE = "load_balancing_loss_func"

# In names of attributes that count heads, or query heads for each key-value head, or features.
_NUMBERS = ("head", "n_rep", "group", "per_kv", "dim", "size", "embd", "width", "model")


@dataclass(frozen=True)
class Layer:
    """One module that holds parameters of its own, ends a branch of the tree, is a sequence, or counts heads.

    Attributes:
        name: its FQN.
        kind: name of its class.
        role: "linear", "conv1d" (a linear with its weight turned), "embedding", "norm", "attention" (torch's), "computed" (one
            of the first three whose weight is computed from other parameters, as by `weight_norm`), or "".
        shapes: its own parameters and their shapes.
        numbers: its whole-number attributes that may count heads or features.
        is_sequence: whether it runs its children one after the other and does nothing else.
    """

    name: str
    kind: str
    role: str = ""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    numbers: tuple[tuple[str, int], ...] = ()
    is_sequence: bool = False


@dataclass(frozen=True)
class Quantised:
    """A parameter that a library keeps in few bits. Its bytes are no numbers: they mean something together with statistics.

    Attributes:
        name: its FQN.
        kind: "4-bit" or "8-bit" (bitsandbytes), or the name of its class (torchao).
        bytes: of the parameter and its statistics.
        batch_threshold: of an 8-bit layer that chooses columns of its input by the largest value in the batch; 0 without.
        trained: whether it requires a gradient, as an 8-bit layer does that keeps its weight in 16 bits.
    """

    name: str
    kind: str
    bytes: int
    batch_threshold: float = 0.0
    trained: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """Facts about one model; on the meta device they are the same as on a real one.

    Attributes:
        name: class of the model.
        parameters: elements in all parameters, tied ones once.
        trainable: elements in those that require a gradient.
        parameter_bytes: bytes of all parameters, tied ones once; a quantised one with what turns it back into numbers.
        trainable_bytes: bytes of those that require a gradient.
        quantised: frozen parameters that a library keeps in few bits, see `Quantised`.
        tied: groups of names that share one parameter.
        dtypes: dtypes of the trainable parameters, as text.
        half_names: trainable parameters held in float16; gradients of such cannot be unscaled.
        batch_norms: names of the modules that keep batch statistics of their own.
        batch_layers: name and kind of other modules whose training pass depends on the whole batch, or changes them by it:
            embeddings with `max_norm` or `scale_grad_by_freq`, and instance norms with running statistics.
        spectral_norms: names of the modules in which each forward pass in training makes a step towards a spectral norm.
        random_layers: name and kind of the modules that say of themselves that they draw random numbers in training.
        sparse: whether some gradient is sparse.
        blocks: names of the repeated blocks, in order; see `plan.blocks`.
        meta: whether some tensor has a shape only, and is to get its values here.
        apart: whether each rank has built the values of its own stage of a pipeline alone; see `Stages`.
        devices: where its tensors are, those without values left out, as text.
        layers: its modules, see `Layer`, in order.
        modules: name and class of each module that can be called, in order, the root first.
        hooked: trainable parameters with hooks of the user's on their gradients.
        lazy: parameters without a shape: modules such as `nn.LazyLinear` choose it when the first batch passes.
        tensor_plan: the model's own plan for tensor parallelism (transformers' `tp_plan`): pattern -> style.
        experts: the experts of a Mixture of Experts, by layer; see `plan.experts`.
        balanced: names of the modules whose forward can add the loss by which transformers balances experts.
        auxiliary_loss: the setting of the model's own that adds a loss which balances its experts; "" without one.
    """

    name: str
    parameters: int
    trainable: int
    parameter_bytes: int
    trainable_bytes: int = 0
    quantised: tuple[Quantised, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    half_names: tuple[str, ...] = ()
    batch_norms: tuple[str, ...] = ()
    batch_layers: tuple[tuple[str, str], ...] = ()
    spectral_norms: tuple[str, ...] = ()
    random_layers: tuple[tuple[str, str], ...] = ()
    sparse: bool = False
    blocks: tuple[str, ...] = ()
    meta: bool = False
    apart: bool = False
    devices: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    tensor_plan: tuple[tuple[str, str], ...] = ()
    hooked: tuple[str, ...] = ()
    lazy: tuple[str, ...] = ()
    experts: tuple[Experts, ...] = ()
    balanced: tuple[str, ...] = ()
    auxiliary_loss: str = ""

    @property
    def converted_norms(self) -> tuple[str, ...]:
        """Names of the layers that `nn.SyncBatchNorm.convert_sync_batchnorm` has made."""
        return tuple(name for name, kind in self.modules if kind == "SyncBatchNorm")

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters, each with the first name, under which the parameter counts."""
        first_names: dict[str, str] = {}
        for first, *others in self.tied:
            first_names |= dict.fromkeys(others, first)
        return first_names

    def elements_of(self, experts: Iterable[Experts]) -> int:
        """Returns the number of elements in the weights of experts."""
        names = {f"{row.name}.{key}".lstrip(".") for row in experts for key in row.parameters}
        elements = 0
        for layer in self.layers:
            for key, shape in layer.shapes:
                if f"{layer.name}.{key}".lstrip(".") in names:
                    elements += prod(shape)
        return elements


def model_facts(model: torch.nn.Module, experts: Sequence[str] = ()) -> ModelFacts:
    """Reads the facts of a model; changes nothing and computes nothing on its device.

    Args:
        model: whose facts are read.
        experts: name patterns of the modules that hold experts; empty for all that are found.
    """
    from paceline.torch_internals.modules import iterates

    # A tied parameter stands under several names, and counts once, under the first.
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    shaped = {first: parameter for parameter, (first, *_) in names.items() if not _is_lazy(parameter)}
    trained = {name: parameter for name, parameter in shaped.items() if parameter.requires_grad}
    quantised = _rows(shaped.items(), lambda name, parameter: _quantised(name, parameter, model))
    bytes_of = {name: _bytes(parameter) for name, parameter in shaped.items()}
    bytes_of |= {row.name: row.bytes for row in quantised}

    modules = list(model.named_modules())
    tensors = [*names, *model.buffers()]
    # The values of such a model are on other ranks, so that nothing has to be initialized here.
    apart = bool(getattr(model, "pipeline_apart", False))
    return ModelFacts(
        name=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in shaped.values()),
        trainable=sum(parameter.numel() for parameter in trained.values()),
        parameter_bytes=sum(bytes_of.values()),
        trainable_bytes=sum(bytes_of[name] for name in trained),
        quantised=quantised,
        tied=tuple(tuple(group) for group in names.values() if len(group) > 1),
        dtypes=_sorted_text(parameter.dtype for parameter in names if parameter.requires_grad),
        half_names=tuple(name for name, parameter in trained.items() if str(parameter.dtype) == "torch.float16"),
        # Those that never train (`FrozenBatchNorm2d`) are none.
        batch_norms=tuple(name for name, module in modules if "_BatchNorm" in _class_names(module)),
        batch_layers=_rows(modules, _seen_of_batch),
        spectral_norms=tuple(name for name, module in modules if iterates(module)),
        random_layers=_rows(modules, _randomness),
        sparse=any(getattr(module, "sparse", False) is True for _, module in modules),
        blocks=repeated_blocks(model),
        meta=not apart and any(tensor.is_meta for tensor in tensors),
        apart=apart,
        devices=_sorted_text(tensor.device for tensor in tensors if not tensor.is_meta),
        layers=_rows(modules, _layer),
        modules=_rows(modules, _callable),
        tensor_plan=_tensor_plan(model),
        hooked=tuple(name for name, parameter in trained.items() if _has_foreign_hook(parameter)),
        lazy=tuple(first for parameter, (first, *_) in names.items() if _is_lazy(parameter)),
        experts=_experts(model, experts),
        balanced=tuple(name for name, module in modules if _balances_experts(module)),
        auxiliary_loss=_auxiliary_loss(model),
    )


def _rows(named: Iterable[tuple[str, T]], row_of: Callable[[str, T], Row | None]) -> tuple[Row, ...]:
    """Returns the rows of those parameters or modules that have one."""
    rows = (row_of(name, value) for name, value in named)
    return tuple(row for row in rows if row is not None)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _class_names(value: object) -> set[str]:
    """Names of an object's class and of all that it inherits from: planning knows torch's classes by name alone."""
    return {base.__name__ for base in type(value).__mro__}


def _quantised(name: str, parameter: torch.nn.Parameter, model: torch.nn.Module) -> Quantised | None:
    """Returns the row of a parameter that a library keeps in few bits; None for any other."""
    classes = _class_names(parameter)
    nbytes = _bytes(parameter)
    if "Params4bit" in classes:
        nbytes += sum(map(_bytes, four_bit_statistics(getattr(parameter, "quant_state", None))))
        return Quantised(name, "4-bit", nbytes)
    if "Int8Params" in classes:
        if parameter.dtype.itemsize == 1:
            nbytes += 4 * parameter.shape[0]  # a float32 for each row
        layer = model.get_submodule(name.rpartition(".")[0])
        threshold = float(getattr(getattr(layer, "state", None), "threshold", 0.0))
        return Quantised(name, "8-bit", nbytes, threshold, parameter.requires_grad)
    if "TorchAOBaseTensor" in classes:
        nbytes = sum(map(_bytes, plain_tensors(parameter).values()))
        return Quantised(name, type(parameter).__name__, nbytes, trained=parameter.requires_grad)
    return None


def four_bit_statistics(quant_state: Any) -> list[torch.Tensor]:
    """Returns the tensors of bitsandbytes' `QuantState`, which turn the bytes of a 4-bit weight back into numbers."""
    if quant_state is None:
        return []
    statistics = [quant_state.absmax, quant_state.code]
    if quant_state.nested:
        statistics += [quant_state.offset, quant_state.state2.absmax, quant_state.state2.code]
    return statistics


def _is_lazy(parameter: torch.nn.Parameter) -> bool:
    """Returns whether a parameter has no shape before the first batch."""
    return "UninitializedTensorMixin" in _class_names(parameter)


def _seen_of_batch(name: str, module: torch.nn.Module) -> tuple[str, str] | None:
    """The option by which a module other than a batch norm depends on the whole batch in training; None without one."""
    classes = _class_names(module)
    option = ""
    if classes & {"Embedding", "EmbeddingBag"}:
        if getattr(module, "max_norm", None) is not None:
            option = f"max_norm={module.max_norm:g}"
        elif getattr(module, "scale_grad_by_freq", False):
            option = "scale_grad_by_freq"
    elif "_InstanceNorm" in classes and getattr(module, "running_mean", None) is not None:
        option = "track_running_stats"
    return (name, f"{type(module).__name__} {option}") if option else None


def _balances_experts(module: torch.nn.Module) -> bool:
    """Whether the forward of a module calls the function by which transformers balances experts, or one of that form."""
    function = unwrap(type(module).forward)
    if BALANCE not in getattr(getattr(function, "__code__", None), "co_names", ()):
        return False
    called = getattr(function, "__globals__", {}).get(BALANCE)
    arguments = getattr(getattr(called, "__code__", None), "co_varnames", ())
    return tuple(arguments[:4]) == ("gate_logits", "num_experts", "top_k", "attention_mask")


def _randomness(name: str, module: torch.nn.Module) -> tuple[str, str] | None:
    """What makes a module random, in a few words; None where nothing in it says so."""
    kind = type(module).__name__
    classes = _class_names(module)
    if classes & {"RReLU", "FractionalMaxPool2d", "FractionalMaxPool3d"}:
        return name, kind
    is_dropout = "_DropoutNd" in classes or "drop" in kind.lower() or "StochasticDepth" in classes
    # Models of other libraries call the rate `p`, `prob`, `drop_prob`, `attention_dropout`, ... A rate of 0 draws nothing.
    for key, rate in vars(module).items():
        may_be_rate = "drop" in key.lower() or (is_dropout and key in ("p", "prob"))
        if may_be_rate and type(rate) is float and 0 < rate <= 1:
            return name, f"{kind} {key}={rate:g}"
    return None


def _callable(name: str, module: torch.nn.Module) -> tuple[str, str] | None:
    """The class of a module that can be called; None of others, as a `ModuleList` is."""
    if getattr(type(module).forward, "__name__", "") == "_forward_unimplemented":
        return None
    return name, type(module).__name__


def _has_foreign_hook(parameter: torch.nn.Parameter) -> bool:
    """Returns whether a hook on its gradient is anybody's but ours."""
    from paceline.torch_internals.tensors import gradient_hooks

    # These hooks stand on the tensor itself, and would be lost if a strategy replaces the parameter.
    owners = [str(getattr(hook, "__module__", "")) for hook in gradient_hooks(parameter)]
    return not all(is_our_module(owner) for owner in owners)


def _layer(name: str, module: torch.nn.Module) -> Layer | None:
    """Returns the row of a module; None for one that only holds others."""
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    shapes = tuple((key, tuple(parameter.shape)) for key, parameter in own if not _is_lazy(parameter))
    numbers = []
    for key, value in vars(module).items():
        counts = key in ("h", "H") or any(word in key.lower() for word in _NUMBERS)
        if counts and type(value) is int:
            numbers.append((key, value))
    kind = type(module).__name__
    is_leaf = next(module.children(), None) is None
    if not (shapes or numbers or is_leaf or is_sequence(module)):
        return None
    return Layer(name, kind, _role(module), shapes, tuple(numbers), is_sequence(module))


def _role(module: torch.nn.Module) -> str:
    """What a module computes, where its class is known to compute just that."""
    # A subclass that keeps torch's `forward` computes the same, whatever its name; one that overrides it may not.
    kind = type(module).__name__
    if kind == "MultiheadAttention":
        return "attention"
    forward = getattr(type(module).forward, "__qualname__", "")
    has_weight = any(name == "weight" for name, _ in module.named_parameters(recurse=False))
    if not has_weight and forward in ("Linear.forward", "Conv1D.forward", "Embedding.forward"):
        return "computed"
    if forward in ("Linear.forward", "Float8Linear.forward"):  # torchao's computes the same, in float8
        return "linear"
    if forward == "Conv1D.forward":
        return "conv1d"
    if forward == "Embedding.forward":
        # With these options the forward pass changes the weight, or the gradient is sparse or depends on the whole batch.
        special = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        return "" if special else "embedding"
    is_leaf = next(module.children(), None) is None
    dims = {parameter.dim() for parameter in module.parameters(recurse=False) if not _is_lazy(parameter)}
    # `elementwise_affine=False` leaves a norm of torch's without parameters, but with the attribute.
    has_weights = bool(dims) or hasattr(module, "weight")
    is_norm = "norm" in kind.lower() and is_leaf and has_weights and dims <= {1}
    return "norm" if is_norm else ""


def _tensor_plan(model: torch.nn.Module) -> tuple[tuple[str, str], ...]:
    """What transformers' models say of themselves; a base model's part lacks its prefix in the config."""
    own = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not own:
        own = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not isinstance(own, dict):
        return ()
    return tuple((str(pattern), str(style)) for pattern, style in own.items())


def _experts(model: torch.nn.Module, patterns: Sequence[str]) -> tuple[Experts, ...]:
    """The experts of a model; () where no part is installed that divides them over ranks, or counts their tokens."""
    may_be = bool(patterns) or any("expert" in name.lower() for name, _ in model.named_modules())
    if not may_be and not any(parameter.dim() == 3 for parameter in model.parameters() if not _is_lazy(parameter)):
        return ()
    if "experts" not in FACTS.names():
        return ()
    found: tuple[Experts, ...] = FACTS.get("experts")(model, patterns)
    return found


def _auxiliary_loss(model: torch.nn.Module) -> str:
    """The setting by which a model of transformers adds a loss that balances its experts; "" where it adds none."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    coefficient = getattr(config, "router_aux_loss_coef", 0)
    if not coefficient or not getattr(config, "output_router_logits", False):
        return ""
    return f"router_aux_loss_coef={coefficient}"


def _sorted_text(values: Iterable[torch.dtype | torch.device]) -> tuple[str, ...]:
    texts = {str(value).removeprefix("torch.") for value in values}
    return tuple(sorted(texts))
