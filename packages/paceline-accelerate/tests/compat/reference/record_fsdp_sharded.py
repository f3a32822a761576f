"""Writes recorded_fsdp_sharded/ with the real accelerate's FSDP 2 on two processes, and the weights one step later.

torchrun --nproc-per-node 2 record_fsdp_sharded.py, in this folder. See record_fsdp.py for FSDP on the CPU.
"""

import json
import os

import accelerate.state as state
import fsdp_sharded_program as program
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, save_fsdp_model, save_fsdp_optimizer

FOLDER = "recorded_fsdp_sharded"


def made_fsdp(cls, kept):
    """Lets a state of accelerate's say FSDP."""
    made = cls.__init__

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        told = {name: kwargs[name] for name in kept if kwargs.get(name)}
        cls._shared_state.update({"distributed_type": DistributedType.FSDP, **told})

    cls.__init__ = init


made_fsdp(state.PartialState, ())
made_fsdp(state.AcceleratorState, ("fsdp_plugin",))
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="no_wrap", state_dict_type="SHARDED_STATE_DICT"
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
model, optimizer = accelerator.prepare(*program.build(0))
program.step(accelerator, model, optimizer)
save_fsdp_model(plugin, accelerator, model, FOLDER)
save_fsdp_optimizer(plugin, accelerator, optimizer, model, FOLDER)
program.step(accelerator, model, optimizer)
state_after = program.weights(accelerator, model)
if os.environ["RANK"] == "0":
    with open(f"{FOLDER}/after.json", "w", encoding="utf-8") as file:
        json.dump(state_after, file)
