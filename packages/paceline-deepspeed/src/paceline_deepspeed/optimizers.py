"""DeepSpeed's optimizers: torch's own behind its names, arguments and defaults.

    build("Adam", {"lr": 1e-3}, parameters, config)     what a config asks for
    FusedAdam(parameters, lr=1e-3)                      what a script makes: torch's AdamW, with its fused kernels

"Adam" means decoupled weight decay, as DeepSpeed has it, unless `adam_w_mode` is false.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.base.errors import ConfigError
from paceline.base.log import warn_once
from paceline_deepspeed import muon
from paceline_deepspeed.config import DeepSpeedConfig
from paceline_deepspeed.config.parts import CLOSURE
from paceline_large.optim.eight_bit import adamw8bit
from paceline_large.optim.lamb import Lamb
from paceline_large.optim.lion import Lion

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]  # parameters, or groups of them
# Parameters of DeepSpeed's optimizers that torch's do not take: they have no effect here, or `build` reads them.
_IDLE = ("torch_adam", "set_grad_none", "fp32_optimizer_states", "adam_w_mode", "adamw_mode")


class _StandsFor(type):
    """A class of DeepSpeed's: calling it makes an optimizer of torch's, and that is an instance of it.

    torch's own classes, and no subclasses of them: they step in fused kernels and are divided by rows.
    """

    instance_types: tuple[type, ...]

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        # A script's own class over one of these has no `build` of its own, and is made as any class.
        if "build" in vars(cls):
            return cls.build(*args, **keywords)  # type: ignore[attr-defined]
        return super().__call__(*args, **keywords)

    def __instancecheck__(cls, value: object) -> bool:
        if "build" in vars(cls):
            return isinstance(value, cls.instance_types)
        return super().__instancecheck__(value)


def _refuse(name: str, why: str, fix: str) -> ConfigError:
    return ConfigError("deepspeed-optimizer", f"the optimizer {name} cannot be made.", why=why, fix=fix)


def refuse_closure(optimizer: Optimizer) -> None:
    """Refuses an optimizer of the script's that steps with a closure.

    Raises:
        ConfigError: `deepspeed-optimizer`.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        why, fix = CLOSURE
        raise ConfigError("deepspeed-optimizer", "LBFGS cannot be the optimizer of an engine.", why=why, fix=fix)


def _clipped(name: str, max_grad_norm: float) -> None:
    if max_grad_norm:
        why = f"max_grad_norm={max_grad_norm}: the engine clips, and not the optimizer"
        raise _refuse(name, why, f"leave it out, and write `gradient_clipping: {max_grad_norm}` in the config")


def _made(make: Callable[..., Optimizer], arguments: Mapping[str, Any]) -> Optimizer:
    """Makes an optimizer from the arguments of one of DeepSpeed's classes, of which the first is the parameters."""
    params, *_ = arguments.values()
    names = [name for name in list(arguments)[1:] if name not in _IDLE]
    return make(params, **{name: arguments[name] for name in names})


def _adam(name: str, params: Params, decoupled: bool, bias_correction: bool = True, **keywords: Any) -> Optimizer:
    if not bias_correction:
        raise _refuse(name, "bias_correction=False: torch's Adam always corrects its averages", "leave it out")
    keywords.setdefault("weight_decay", 0.0)  # DeepSpeed's default; torch's AdamW has another
    keywords["betas"] = tuple(keywords.get("betas", (0.9, 0.999)))
    if decoupled:
        return torch.optim.AdamW(params, **keywords)
    return torch.optim.Adam(params, **keywords)


class FusedAdam(torch.optim.Adam, metaclass=_StandsFor):
    """torch's AdamW (Adam, with `adam_w_mode=False`)."""

    instance_types = (torch.optim.Adam,)

    @staticmethod
    def build(
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> Optimizer:
        return _made(partial(_adam, "FusedAdam", decoupled=adam_w_mode), locals())


class DeepSpeedCPUAdam(torch.optim.Adam, metaclass=_StandsFor):
    """torch's AdamW; where its states live, the config's `offload_optimizer` says."""

    instance_types = (torch.optim.Adam,)

    @staticmethod
    def build(
        model_params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> Optimizer:
        return _made(partial(_adam, "DeepSpeedCPUAdam", decoupled=adamw_mode), locals())


class DeepSpeedCPUAdagrad(torch.optim.Adagrad, metaclass=_StandsFor):
    """torch's Adagrad."""

    instance_types = (torch.optim.Adagrad,)

    @staticmethod
    def build(
        model_params: Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> Optimizer:
        return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


def _lamb(params: Params, max_grad_norm: float = 0.0, amsgrad: bool = False, **keywords: Any) -> Optimizer:
    _clipped("Lamb", max_grad_norm)
    if amsgrad:
        raise _refuse("Lamb", "amsgrad=True: Lamb has no such form", "leave it out")
    return Lamb(params, **keywords)


class FusedLamb(Lamb, metaclass=_StandsFor):
    """Our `Lamb`."""

    instance_types = (Lamb,)

    @staticmethod
    def build(
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> Optimizer:
        return _made(_lamb, locals())


class FusedLion(Lion, metaclass=_StandsFor):
    """Our `Lion`, with DeepSpeed's default for the second beta."""

    instance_types = (Lion,)

    @staticmethod
    def build(
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> Optimizer:
        return Lion(params, lr=lr, betas=betas, weight_decay=weight_decay)


class DeepSpeedCPULion(FusedLion):
    """`FusedLion` with DeepSpeed's name for its first argument."""

    @staticmethod
    def build(
        model_params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> Optimizer:
        return Lion(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


def _muon(params: Params, decoupled: bool = True, **options: Any) -> Optimizer:
    """DeepSpeed's Muon, with an Adam for what is no matrix."""
    groups = list(params)
    parameters: list[Any] = []
    for group in groups:
        parameters += group["params"] if isinstance(group, Mapping) else [group]
    num_strange = sum("use_muon" not in vars(parameter) for parameter in parameters)
    if num_strange:
        why = f"{num_strange} of {len(parameters)} parameters in `model_parameters` are not the model's, so it is not known "
        raise _refuse(
            "Muon", why + "which half steps them", "pass `model_parameters=model.parameters()`, or set `param.use_muon`"
        )
    method = options.get("ns_method", muon.NS_METHODS[0])
    if method not in muon.NS_METHODS:
        raise _refuse("Muon", f"ns_method is {method!r}", f"write one of {', '.join(muon.NS_METHODS)}")
    return muon.MuonWithAdam(muon.param_groups(groups, options), decoupled)


# What makes DeepSpeed's types and `adamw8bit`, whatever their capital letters; all others are torch's, by their exact names.
_OF_CONFIG: dict[str, Callable[..., Optimizer]] = {
    "adam": partial(_adam, "Adam"),
    "adamw": partial(_adam, "AdamW"),
    "lamb": _lamb,
    "lion": FusedLion,
    "muon": _muon,
    "adagrad": torch.optim.Adagrad,
    "adamw8bit": adamw8bit,
    "sgd": torch.optim.SGD,
}


def build(
    type: str, params: Mapping[str, Any], parameters: Iterable[Any], config: DeepSpeedConfig | None = None
) -> Optimizer:
    """Makes the optimizer that a config asks for.

    Args:
        type: its name: one of DeepSpeed's, or of a class in `torch.optim`.
        params: its arguments.
        parameters: those that it steps; tensors or groups.
        config: said in errors.

    Raises:
        ConfigError: `deepspeed-optimizer`.
    """
    given_params = {name: value for name, value in params.items() if value != "auto"}
    _clipped(type, given_params.pop("max_grad_norm", 0.0))
    keywords: dict[str, Any] = {}
    for name, value in given_params.items():
        if name in _IDLE:
            continue
        if isinstance(value, list):
            value = tuple(value)  # JSON has no tuples, which torch's betas are
        keywords[name] = value
    if type.lower() in ("adam", "adamw"):
        # The first is the key of FusedAdam, the second that of DeepSpeedCPUAdam.
        adam_w_mode = given_params.get("adam_w_mode", given_params.get("adamw_mode", True))
        keywords["decoupled"] = type.lower() == "adamw" or bool(adam_w_mode)
        if given_params.get("torch_adam") and keywords["decoupled"]:
            keywords.setdefault("weight_decay", 0.01)  # torch's own default then
    if type.lower() == "muon":
        keywords["decoupled"] = bool(given_params.get("adam_w_mode", True))
    make = _OF_CONFIG.get(type.lower()) or getattr(torch.optim, type, None)
    if make is None or (inspect.isclass(make) and not issubclass(make, Optimizer)):
        place = "optimizer.type"
        if config:
            place = config.places.get("optimizer.type", config.source)
        why = f"{place} names it; neither DeepSpeed nor torch.optim has it"
        raise _refuse(type, why, "write AdamW, or the name of a class in torch.optim")
    try:
        return make(list(parameters), **keywords)
    except TypeError as error:
        raise _refuse(type, f"its params are {dict(params)}: {error}", "leave out what it does not take") from error


def chosen(parsed: DeepSpeedConfig, model: nn.Module, optimizer: Any, model_parameters: Any) -> Any:
    """Returns the script's optimizer, else the config's; None where neither is there.

    Args:
        parsed: the config.
        model: whose parameters it steps.
        optimizer: the script's, or a function that makes one of parameters.
        model_parameters: tensors, groups or one group; None for all that are trained.
    """
    name = parsed["optimizer.type"]
    params = parsed["optimizer.params"]
    parameters: list[Any]
    if model_parameters is None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    elif isinstance(model_parameters, Mapping):  # a single group
        parameters = [model_parameters]
    else:
        parameters = list(model_parameters)
    if optimizer is None and name is None:
        return None
    if optimizer is None:
        if name.lower() == "muon":
            muon.set_optimizer_flags(model)
        return build(name, params, parameters, parsed)
    own = optimizer
    if not isinstance(optimizer, Optimizer):
        own = optimizer(parameters)
    refuse_closure(own)
    if name is not None:
        warn_once(
            "compat",
            f"two optimizers: the script's {type(own).__name__} (lr {own.param_groups[0]['lr']}) is used, and the "
            f"config's {name} (lr {params.get('lr', 'not given')}, "
            f"{parsed.places.get('optimizer.type', parsed.source)}) is not. Drop one of them.",
        )
    return own
