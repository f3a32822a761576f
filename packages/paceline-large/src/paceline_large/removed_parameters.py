"""`refuse_removed`: lets forward passes refuse that a divided parameter was removed. Under `shard`, `Units` does so itself."""

from __future__ import annotations

from torch import nn

from paceline.parallel.divided_parameters import removed_error
from paceline.torch_internals.modules import parameter_table
from paceline.world.sharded import is_sharded


def refuse_removed(model: nn.Module) -> None:
    """Makes forward passes of the model refuse that a divided parameter was removed from its module, as pruning does.

    The hook raises PlanError: `shard-changed`.
    """
    places = [
        (module_name, parameter_table(module), name)
        for module_name, module in model.named_modules()
        for name, parameter in parameter_table(module).items()
        if is_sharded(parameter)
    ]

    def check(*_: object) -> None:
        for module_name, slots, name in places:
            if name not in slots:
                raise removed_error(f"{module_name}.{name}".lstrip("."))

    model.register_forward_pre_hook(check, prepend=True)
