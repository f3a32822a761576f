"""Saves checkpoint folders with the real accelerate: `python record_folders.py`; see record.py for what it needs.

Writes folders.tar.xz: for each kind of run a folder of `save_state`, and `want.pt` with what was in it. accelerate leaves its
FSDP alone on the CPU, so its state is told here that there is FSDP (see record_fsdp.py), and torch's FSDP1, which takes no
CPU either, that the device it computes on is the CPU. After that save FSDP1 cannot gather there: its weights in `want.pt` are
those that torch's own reader finds in the folder.
"""

import os
import random
import sys
import tarfile
import tempfile
from pathlib import Path

from real_ranks import run_on_ranks

HERE = Path(__file__).parent
KINDS = {"plain": 1, "torch": 1, "ddp": 2, "fsdp1-sharded": 2, "fsdp2-sharded": 2, "fsdp2-full": 2}


def pretend_fsdp(version):
    """Lets accelerate divide models on the CPU."""
    import accelerate.state as state
    import torch
    from accelerate.utils import DistributedType

    def made_fsdp(cls, keep):
        made = cls.__init__

        def init(self, *args, **kwargs):
            made(self, *args, **kwargs)
            told = {name: kwargs[name] for name in keep if kwargs.get(name)}
            cls._shared_state.update({"distributed_type": DistributedType.FSDP, **told})

        cls.__init__ = init

    made_fsdp(state.PartialState, ())
    made_fsdp(state.AcceleratorState, ("fsdp_plugin",))
    if version == 1:
        import torch.distributed.fsdp._init_utils as inside

        inside._get_compute_device = lambda *args, **kwargs: torch.device("cpu")


def worker(kind, out):
    """One process: two optimizer steps or more, `save_state`, and one step more."""
    import folders_program
    import numpy
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    options = {}
    if kind.startswith("fsdp"):
        version, form = int(kind[4]), kind[6:].upper()
        pretend_fsdp(version)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=f"{form}_STATE_DICT")
        plugin.use_orig_params = True if version == 1 else None
        options["fsdp_plugin"] = plugin
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    random.seed(3)
    numpy.random.seed(3)
    net, optimizer, schedule = folders_program.made(seed=3)
    inputs, targets = folders_program.rows()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), 4, shuffle=True)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    counter = folders_program.Counter()
    accelerator.register_for_checkpointing(counter)
    for x, y in loader:
        with accelerator.accumulate(net):
            accelerator.backward(folders_program.loss_of(net(x), y))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            counter.count += 1
    accelerator.save_state(f"{out}/state", safe_serialization=kind != "torch")
    want = {"count": counter.count, "draws": (random.random(), float(numpy.random.rand()), float(torch.rand(())))}
    if kind == "fsdp1-sharded":
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

            dcp_to_torch_save(f"{out}/state/pytorch_model_fsdp_0", f"{out}/want.pt")
            want["weights"] = torch.load(f"{out}/want.pt")["model"]
    else:
        want["weights"] = {name: value.clone() for name, value in accelerator.get_state_dict(net).items()}
        accelerator.gradient_state._set_sync_gradients(True)
        accelerator.backward(2 * folders_program.loss_of(net(inputs), targets))  # accumulation would halve it
        optimizer.step()
        want["went_on"] = accelerator.get_state_dict(net)
    if accelerator.is_main_process:
        torch.save(want, f"{out}/want.pt")
    accelerator.wait_for_everyone()
    os._exit(0)


def main():
    """Each kind, with torchrun's variables; then one archive of all."""
    with tempfile.TemporaryDirectory() as out:
        for kind, size in KINDS.items():
            Path(out, kind).mkdir()
            run_on_ranks(size, __file__, "worker", kind, str(Path(out, kind)))
        with tarfile.open(HERE / "folders.tar.xz", "w:xz") as archive:
            for kind in KINDS:
                archive.add(Path(out, kind), kind, filter=_nobody)


def _nobody(entry):
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    worker(*sys.argv[2:4]) if sys.argv[1:2] == ["worker"] else main()
