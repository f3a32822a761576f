"""A module's tensors by name: without the names that wrappers add, and a tied parameter once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from paceline.torch_internals.modules import compiled_original, loading_functions
from paceline.world.sharded import is_made_of_tensors, plain_tensors

_WRAPPER_NAMES = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")

_MODULES_OF_TORCH = ("torch.nn.modules.", "torch.distributed.fsdp.")


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the user's module under DDP and `torch.compile`."""
    while True:
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            module = cast(nn.Module, module.module)
            continue
        original = compiled_original(module)
        if original is None:
            return module
        module = original


def clean(name: str) -> str:
    """A parameter's name without the parts that compiling or recomputing a block added."""
    return _WRAPPER_NAMES.sub("", name)


@dataclass
class ModuleState:
    """What a module's `state_dict` holds, sorted.

    Attributes:
        tensors: by clean name, each tied tensor under its first name alone. One that is made of others, such as a weight of few
            bits, is these, by its name and theirs: "0.weight.qdata" and "0.weight.scale".
        aliases: the other names of tied tensors -> their first name.
        made: the tensors that are made of others, by clean name.
        values: entries that are no tensors, such as a module's extra state.
        buffers: names of those tensors that are no parameters.
        raw: clean name -> the name that the module itself uses.
        shares_memory: whether the tensors are the module's own parameters and buffers, and not what it made of them.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    made: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    raw: dict[str, str] = field(default_factory=dict)
    shares_memory: bool = True

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """Reads a module, wrapped or not; the tensors share its memory."""
        state = cls()
        first_names: dict[int, str] = {}  # by the id of a tensor, under which a tied one appears again
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for raw, value in unwrap(module).state_dict(keep_vars=True).items():
            name = clean(raw)
            state.raw[name] = raw
            if not isinstance(value, Tensor):
                state.values[name] = value
            elif is_made_of_tensors(value):
                state.made[name] = value
                state.tensors |= plain_tensors(value, name)
            elif id(value) in first_names:
                state.aliases[name] = first_names[id(value)]
            else:
                first_names[id(value)] = name
                state.tensors[name] = value.detach()
                state.shares_memory &= id(value) in own
                if not isinstance(value, nn.Parameter):
                    state.buffers.add(name)
        return state

    def put(self, module: nn.Module, values: Mapping[str, Any]) -> None:
        """Gives the tensors (as they are now) and `values` to the module's `load_state_dict`.

        Where that would copy the module's tensors to themselves and nothing else, it is left out: it looks at every name
        once for each module.
        """
        if self.shares_memory and not self.values and not _loads_by_itself(unwrap(module)):
            return
        entries = {**self.values, **values, **self.tensors, **self.made}
        entries |= {name: self.tensors[first] for name, first in self.aliases.items()}
        raw_entries = {raw: entries[name] for name, raw in self.raw.items()}
        unwrap(module).load_state_dict(raw_entries)


def _loads_by_itself(module: nn.Module) -> bool:
    """Returns whether some part of a module does more in a load than torch's own modules do."""
    for part in module.modules():
        for function in (part.load_state_dict, *loading_functions(part)):
            if not str(getattr(function, "__module__", "")).startswith(_MODULES_OF_TORCH):
                return True
    return False


def own_names(module: nn.Module, tied: Mapping[str, str]) -> dict[str, Tensor]:
    """A module's parameters by clean name, each once; one that is tied to one elsewhere goes by the first name of both.

    Args:
        module: wrapped or not.
        tied: the other names of tied parameters -> the first.
    """
    own = {clean(name): parameter for name, parameter in unwrap(module).named_parameters()}
    tensors_by_name: dict[str, Tensor] = {}
    for name, parameter in own.items():
        first = tied.get(name, name)
        # The first name counts only if no other parameter of this module has it.
        tensors_by_name[name if first in own else first] = parameter
    return tensors_by_name


def parameter_names(
    models: Mapping[str, nn.Module], wanted: Iterable[Tensor], tied: Mapping[str, Mapping[str, str]] | None = None
) -> dict[Tensor, str]:
    """Names of an optimizer's parameters: as in their model, with the model's name in front where two would be equal.

    Args:
        models: by name.
        wanted: the optimizer's parameters.
        tied: of each model, the other names of tied parameters -> the first; a stage of a pipeline that holds a copy
            under another name alone calls it by the first, as one process does.

    Returns:
        A name for each of `wanted` that belongs to a model.
    """
    owners: dict[Tensor, tuple[str, str]] = {}
    for model, module in models.items():
        for name, parameter in own_names(module, (tied or {}).get(model, {})).items():
            owners.setdefault(parameter, (model, name))
    owner_of = {parameter: owners[parameter] for parameter in wanted if parameter in owners}
    # Two models may have parameters of the same name. Then the name of the model goes in front of all of them.
    distinct_names = {name for _, name in owner_of.values()}
    if len(distinct_names) == len(owner_of):
        return {parameter: name for parameter, (_, name) in owner_of.items()}
    return {parameter: f"{model}.{name}" for parameter, (model, name) in owner_of.items()}
