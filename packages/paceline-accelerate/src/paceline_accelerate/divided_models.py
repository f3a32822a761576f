"""Lets models of transformers, peft and sentence-transformers be saved, and run, where a plan has divided their parameters.

Scripts call `model.save_pretrained(folder)`, `model.generate(...)` and `model.encode(...)` on the module itself. They read
parameters outside of `forward`, where each rank has only its parts, or run the model a different number of times on each
rank. `paceline.compat` wraps these methods while the libraries are imported.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def save_whole_models(module: ModuleType) -> None:
    """Changes `PreTrainedModel` in `transformers.modeling_utils`, or `PeftModel` in `peft.peft_model`."""
    model_class = getattr(module, "PeftModel", None) or module.PreTrainedModel
    _gather_in(model_class, "save_pretrained")


def generate_with_whole_models(module: ModuleType) -> None:
    """Changes `GenerationMixin` in `transformers.generation.utils`."""
    _gather_in(module.GenerationMixin, "generate")


def encode_with_whole_models(module: ModuleType) -> None:
    """Changes the model class of a module of sentence-transformers, such as `sentence_transformers.cross_encoder.model`."""
    for model_class in vars(module).values():
        for name in ("encode", "predict", "save"):
            is_own = getattr(model_class, "__module__", "") == module.__name__ and name in vars(model_class)
            if isinstance(model_class, type) and is_own:
                _gather_in(model_class, name)


def train_divided_encoders(module: ModuleType) -> None:
    """Changes `BaseTrainer` in `sentence_transformers.base.trainer`."""
    trainer_class = module.BaseTrainer
    save = trainer_class._save
    load = trainer_class._load_from_checkpoint

    @functools.wraps(save)
    def save_once(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        # transformers calls it on all ranks, and this one does not ask for the rank. It also runs the model for its card, and
        # to run a divided model takes all ranks.
        if self.args.should_save:
            save(self, output_dir)
        elif is_divided(self.model):
            with tempfile.TemporaryDirectory() as folder:
                save(self, folder)

    @functools.wraps(load)
    def load_whole(self: Any, checkpoint_path: str, model: nn.Module | None = None) -> None:
        # transformers passes the prepared model, too, where a plan divides it; this method knows no such argument.
        with whole_parameters(self.model, "load_from_checkpoint", writeback=True), _own_classes(self.model):
            load(self, checkpoint_path)

    trainer_class._save = save_once
    trainer_class._load_from_checkpoint = load_whole
    _gather_in(trainer_class, "create_model_card", lambda trainer: trainer.model)


def resume_undivided_models(module: ModuleType) -> None:
    """Changes `Trainer` in `transformers.trainer`: where no plan divides the model, it takes checkpoints of a divided one."""

    def wrap(name: str) -> None:
        load = getattr(module.Trainer, name)

        @functools.wraps(load)
        def load_any(self: Any, checkpoint: str | None, *args: Any, **options: Any) -> Any:
            was_divided = checkpoint is not None and (Path(checkpoint) / "pytorch_model_fsdp.bin").is_file()
            if self.is_fsdp_enabled or self.is_deepspeed_enabled or not was_divided:
                return load(self, checkpoint, *args, **options)
            from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin

            # With these two the trainer calls functions of ours, which read such files under any plan.
            self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
            self.is_fsdp_enabled = True
            try:
                return load(self, checkpoint, *args, **options)
            finally:
                self.is_fsdp_enabled = False
                del self.accelerator.state.fsdp_plugin

        setattr(module.Trainer, name, load_any)

    wrap("_load_from_checkpoint")
    wrap("_load_optimizer_and_scheduler")


def sync_whole_models(module: ModuleType) -> None:
    """Changes `SyncRefModelCallback` in `trl.trainer.callbacks`, which mixes the weights of a model into another one."""
    sync = module.SyncRefModelCallback._sync_target_model

    @functools.wraps(sync)
    def sync_whole(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        from paceline.parallel import divided_parameters

        # trl divides the reference model by torch's FSDP, of either version, into other parts than those of the plan.
        with (
            whole_parameters(model, "sync_ref_model"),
            FullyShardedDataParallel.summon_full_params(target_model, writeback=True),
            divided_parameters.whole_parameters(target_model, writeback=True),
        ):
            sync(model, target_model, alpha)

    module.SyncRefModelCallback._sync_target_model = staticmethod(sync_whole)


@contextmanager
def _own_classes(model: nn.Module) -> Iterator[None]:
    """Gives modules their own classes back in the block: `fully_shard` makes another one, which builds no new modules."""
    from torch.distributed.fsdp import FSDPModule

    sharded_classes = {module: type(module) for module in model.modules() if isinstance(module, FSDPModule)}
    for module, sharded_class in sharded_classes.items():
        # The new class inherits from FSDPModule and from the module's own class.
        module.__class__ = sharded_class.__bases__[-1]
    try:
        yield
    finally:
        for module, sharded_class in sharded_classes.items():
            module.__class__ = sharded_class


def is_divided(model: nn.Module) -> bool:
    """Returns whether a rank has only a part of some parameter."""
    # Imported late: names are also served to commands that need no torch. Here torch has been imported by the library.
    from paceline.world.sharded import is_sharded

    return any(map(is_sharded, model.parameters()))


@contextmanager
def whole_parameters(model: nn.Module, topic: str, writeback: bool = False) -> Iterator[None]:
    """Lets the block find whole parameters in a model, or in a part of it, if a plan has divided it.

    Args:
        model: as the script built it.
        topic: what the ranks do, for the error if one of them comes alone.
        writeback: whether changes in the block stay.

    Ranks: with a divided model all must call it.
    """
    from paceline.run.run import live_runs

    if is_divided(model):
        for run in live_runs():
            for entry in run.prepared.models:
                if any(part is model for part in entry.module.modules()):
                    # A rank that comes alone gets an error here, and does not wait for parts that nobody sends.
                    run.collectives.barrier(topic)
                    with run.prepared.full_parameters(entry.module, writeback=writeback):
                        yield
                    return
    yield


def _gather_in(owner: Any, name: str, model_of: Callable[[Any], nn.Module] = lambda model: model) -> None:
    """Lets a method find whole parameters. Ranks: with a divided model all must call it."""
    method = getattr(owner, name)
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        given = options.get("state_dict")
        if args and "state_dict" in signature.parameters:
            given = signature.bind_partial(self, *args, **options).arguments.get("state_dict")
        # Whoever passes a state has gathered it, and may call the method on one rank alone.
        if given is not None:
            return method(self, *args, **options)
        with whole_parameters(model_of(self), name):
            return method(self, *args, **options)

    setattr(owner, name, call)
