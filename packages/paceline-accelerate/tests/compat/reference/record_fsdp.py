"""Runs fsdp_program.py under the real accelerate's FSDP2 on 2 processes: `python record_fsdp.py`; see record.py.

accelerate leaves its FSDP alone on the CPU (its state says MULTI_CPU and plain replicas are trained), so its state is told
here that there is FSDP; from there on its own code divides the model. Writes recorded_fsdp.json.
"""

import json
import os
import sys
from pathlib import Path

from real_ranks import run_on_ranks

HERE = Path(__file__).parent


def worker():
    """One process."""
    import accelerate.state as state
    import fsdp_program
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    def made_fsdp(cls, keep):
        made = cls.__init__

        def init(self, *args, **kwargs):
            made(self, *args, **kwargs)
            told = {
                "distributed_type": DistributedType.FSDP,
                **{name: kwargs[name] for name in keep if kwargs.get(name)},
            }
            cls._shared_state.update(told)

        cls.__init__ = init

    made_fsdp(state.PartialState, ())
    made_fsdp(state.AcceleratorState, ("fsdp_plugin",))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    found = fsdp_program.main(fsdp_plugin=plugin)
    if os.environ["RANK"] == "0":
        (HERE / "recorded_fsdp.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    worker() if len(sys.argv) == 2 else run_on_ranks(2, __file__, "worker")
