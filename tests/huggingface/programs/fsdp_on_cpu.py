"""Runs a program under the real accelerate's FSDP on the CPU, by telling its state: it would train plain replicas there."""

import runpy
import sys

from accelerate import state
from accelerate.utils import DistributedType


def tell(kind, names):
    """Lets the states of a class say FSDP once they are made with a plugin; the process's own state says it anyway."""
    initialise = kind.__init__

    def __init__(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        given = {name: kwargs[name] for name in names if kwargs.get(name)}
        kind._shared_state.update({"distributed_type": DistributedType.FSDP, **given})

    kind.__init__ = __init__


tell(state.PartialState, ())
tell(state.AcceleratorState, ("fsdp_plugin",))
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
