"""What a stranger tries after reading accelerate's documentation: small questions for the real library and for ours.

    python record_surface.py    (an environment with the real accelerate 1.15.0)   -> recorded_surface.json
    test_surface.py             under `paceline.compat`                            -> compared with recorded_surface.json

One process. `everything()` gives a dictionary of answers by topic. An error is told by the Python classes that a script would
catch it as. Questions that `state_program`, `loaders_program`, `big_models_program` and `commands_program` ask are left out.
"""

import collections
import contextlib
import copy
import io
import logging
import os
import tempfile
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from state_program import answer
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


def fresh(**arguments):
    """An accelerator of its own, as in a new process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # A plugin sets one for the whole process.
    for name in [name for name in os.environ if name.startswith("ACCELERATE_USE_") and name != "ACCELERATE_USE_CPU"]:
        del os.environ[name]
    return Accelerator(cpu=True, **arguments)


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def rows(count=10, batch_size=4, **options):
    data = torch.arange(count * 3, dtype=torch.float32).view(count, 3) / 10
    return DataLoader(TensorDataset(data), batch_size=batch_size, **options)


def ask(questions):
    """The answer to each question."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: answer(question) for name, question in questions.items()}


KINDS = (torch.bool, torch.int8, torch.float16, torch.float64)


# -- the accelerator -------------------------------------------------------------------------------------------


def constructors():
    from accelerate.utils import (
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )

    def of(read, **arguments):
        return lambda: read(fresh(**arguments))

    return ask({
        "defaults": of(lambda it: [it.mixed_precision, it.num_processes, it.process_index, it.gradient_accumulation_steps,
                                   str(it.device), it.is_main_process, it.is_local_main_process, it.is_last_process]),
        "flags": of(lambda it: [it.split_batches, it.dispatch_batches, it.even_batches, it.use_seedable_sampler,
                                it.non_blocking, it.use_stateful_dataloader, it.use_distributed, it.multi_device]),
        "project": of(lambda it: [it.project_dir, it.logging_dir, it.save_iteration], project_dir="a"),
        "project config": of(lambda it: [it.project_dir, it.logging_dir],
                             project_config=ProjectConfiguration("a", logging_dir="b")),
        "project twice": of(lambda it: [it.project_dir, it.logging_dir], project_dir="c",
                            project_config=ProjectConfiguration("a")),
        "rng types": of(lambda it: list(it.rng_types), rng_types=["torch"]),
        "rng types by default": of(lambda it: list(it.rng_types)),
        "wrong precision": of(str, mixed_precision="half"),
        "wrong backend": of(str, dynamo_backend="fast"),
        "wrong tracker": of(str, log_with="paper"),
        "backend and plugin": of(str, dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin(backend="eager")),
        "two handlers of a kind": of(str, kwargs_handlers=[GradScalerKwargs(), GradScalerKwargs()]),
        "a handler of no kind": of(str, kwargs_handlers=[3]),
        "a handler of each kind": of(lambda it: [it.ddp_handler.dim, it.scaler_handler.init_scale],
                                     kwargs_handlers=[GradScalerKwargs(), DistributedDataParallelKwargs()]),
        "steps and plugin": of(str, gradient_accumulation_steps=2,
                               gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3)),
        "plugin of steps": of(lambda it: it.gradient_accumulation_steps,
                              gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3)),
        "loading": of(lambda it: [it.split_batches, it.even_batches],
                      dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False)),
        "wrong plugin": of(str, fsdp_plugin=3),
        "wrong deepspeed plugin": of(str, deepspeed_plugin=3),
        "unknown keyword": lambda: Accelerator(precision="no"),
        "old keyword": lambda: Accelerator(logging_dir="x"),
        "setter": lambda: set_and_read(fresh(), "gradient_accumulation_steps", 5),
        "device kind": of(lambda it: type(it.device).__name__),
        "distributed type": of(lambda it: [str(it.distributed_type), it.distributed_type == "NO"]),
        "representation": of(lambda it: sorted(line.partition(":")[0] for line in repr(it.state).splitlines())),
        "fsdp plugin on one process": of(lambda it: str(it.distributed_type),
                                         fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)),
    })  # fmt: skip


def set_and_read(thing, name, value):
    setattr(thing, name, value)
    return getattr(thing, name)


def preparing():
    def kinds(*things, **named):
        prepared = fresh().prepare(*things, **named)
        return [type(each).__name__ for each in prepared] if isinstance(prepared, tuple) else type(prepared).__name__

    def trained(accelerator, model, optimizer):
        loss = model(torch.ones(1, 3)).sum()
        accelerator.backward(loss)
        optimizer.step()
        return [value for tensor in model.parameters() for value in tensor.detach().flatten().tolist()]

    def pair(**arguments):
        accelerator = fresh(**arguments)
        model = linear()
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def scheduler(step_with_optimizer=True):
        accelerator = fresh(step_scheduler_with_optimizer=step_with_optimizer)
        optimizer = torch.optim.SGD(linear().parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
        rates = []
        for _ in range(3):
            optimizer.step()
            schedule.step()
            rates.append(schedule.get_last_lr()[0])
        return rates

    accelerator, model, optimizer = pair()
    return ask({
        "nothing": lambda: kinds(),
        "other things": lambda: kinds(3, None, "text"),
        "one thing": lambda: kinds(linear()),
        "model and optimizer": lambda: kinds(linear(), torch.optim.SGD(linear().parameters(), lr=1.0)),
        "loader": lambda: kinds(rows()),
        "too few places": lambda: kinds(linear(), 3, device_placement=[True]),
        "places": lambda: kinds(linear(), device_placement=[False]),
        "twice": lambda: accelerator.prepare(model) is model,
        "same model": lambda: accelerator.unwrap_model(model) is model,
        "optimizer twice": lambda: accelerator.prepare(optimizer) is optimizer,
        "lists": lambda: [len(accelerator._models), len(accelerator._optimizers), len(accelerator._schedulers)],
        "a step": lambda: trained(*pair()),
        "a step in bf16": lambda: [round(value, 2) for value in trained(*pair(mixed_precision="bf16"))],
        "schedule": scheduler,
        "schedule alone": lambda: scheduler(False),
        "prepared by name": lambda: [
            type(fresh().prepare_model(linear())).__name__,
            type(fresh().prepare_optimizer(torch.optim.SGD(linear().parameters(), lr=1.0))).__name__,
            type(fresh().prepare_data_loader(rows())).__name__,
        ],
        "for evaluation": lambda: type(fresh().prepare_model(linear(), evaluation_mode=True)).__name__,
        "free": lambda: accelerator.free_memory(model, optimizer),
        "freed": lambda: [len(accelerator._models), len(accelerator._optimizers), accelerator.step],
        "output of bf16": lambda: str(fresh(mixed_precision="bf16").prepare(linear())(torch.ones(1, 3)).dtype),
        "wrapped forward": lambda: [
            hasattr(fresh(mixed_precision="bf16").prepare(linear()), "_original_forward"),
            hasattr(fresh().prepare(linear()), "_original_forward"),
        ],
    })  # fmt: skip


def stepping():
    def flags(steps, batches, **options):
        accelerator = fresh(gradient_accumulation_steps=steps, **options)
        model, loader = accelerator.prepare(linear(), rows(batches, 1))
        seen = []
        for _ in loader:
            with accelerator.accumulate(model):
                seen.append(accelerator.sync_gradients)
        return seen

    def twice():
        accelerator = fresh(gradient_accumulation_steps=2)
        model, loader = accelerator.prepare(linear(), rows(3, 1))
        seen = []
        for _ in range(2):
            for _ in loader:
                with accelerator.accumulate(model):
                    seen.append(
                        [
                            accelerator.sync_gradients,
                            accelerator.gradient_state.end_of_dataloader,
                            accelerator.gradient_state.remainder,
                        ]
                    )
        return seen

    def stepped(ask_about):
        accelerator = fresh(gradient_accumulation_steps=2)
        model = linear()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = model.weight.detach().clone()
        seen = []
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 3)).sum())
                optimizer.step()
                seen.append(ask_about(model, optimizer, before))
                optimizer.zero_grad()
        return seen

    def clipped(give, norm_type=2):
        accelerator = fresh()
        model = accelerator.prepare(linear())
        accelerator.backward(model(torch.ones(1, 3)).sum())
        norm = accelerator.clip_grad_norm_(give(model), 0.5, norm_type)
        return [type(norm).__name__, float(norm), model.weight.grad.sum().item()]

    def valued():
        accelerator = fresh()
        model = accelerator.prepare(linear())
        accelerator.backward(model(torch.ones(1, 3)).sum())
        accelerator.clip_grad_value_(model.parameters(), 0.25)
        return model.weight.grad

    def no_sync():
        accelerator = fresh()
        model = accelerator.prepare(linear())
        with accelerator.no_sync(model):
            return accelerator.sync_gradients

    def graph_twice():
        accelerator = fresh()
        model = accelerator.prepare(linear())
        loss = model(torch.ones(1, 3)).sum()
        accelerator.backward(loss, retain_graph=True)
        accelerator.backward(loss)
        return model.weight.grad

    return ask({
        "windows": lambda: flags(2, 5),
        "windows of one": lambda: flags(1, 3),
        "windows longer than the loader": lambda: flags(8, 3),
        "two epochs": twice,
        "steps": lambda: stepped(lambda model, optimizer, before: bool((model.weight != before).any())),
        "gradients": lambda: stepped(lambda model, optimizer, before: model.weight.grad.sum().item()),
        "step was skipped": lambda: stepped(lambda model, optimizer, before: optimizer.step_was_skipped),
        "clip by generator": lambda: clipped(lambda model: model.parameters()),
        "clip by list": lambda: clipped(lambda model: list(model.parameters())),
        "clip one tensor": lambda: clipped(lambda model: model.weight),
        "clip by the largest": lambda: clipped(lambda model: model.parameters(), float("inf")),
        "clip nothing": lambda: clipped(lambda model: []),
        "clip values": valued,
        "no sync": no_sync,
        "the graph is kept": graph_twice,
        "backward twice": lambda: [loss := linear()(torch.ones(1, 3)).sum(), fresh().backward(loss), fresh().backward(loss)],
        "backward of a number": lambda: fresh().backward(3.0),
        "backward of a vector": lambda: fresh().backward(linear()(torch.ones(1, 3))),
        "scale of a window": lambda: windowed_gradient(fresh(gradient_accumulation_steps=4)),
        "accumulate nothing": lambda: contextlib.ExitStack().enter_context(fresh().accumulate()),
        "unscale": lambda: fresh().unscale_gradients(),
        "autocast": lambda: [str(fresh(mixed_precision="bf16").autocast()).partition(" ")[0] != "", autocast_dtype()],
    })  # fmt: skip


def windowed_gradient(accelerator):
    model = accelerator.prepare(linear())
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 3)).sum())
    return model.weight.grad


def autocast_dtype():
    accelerator = fresh(mixed_precision="bf16")
    with accelerator.autocast():
        return str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)


# -- files -----------------------------------------------------------------------------------------------------


class Counter:
    """An object with a state."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def saving():
    from accelerate.utils import ProjectConfiguration, save
    from accelerate.utils.other import load

    folder = Path(tempfile.mkdtemp())

    def names(path):
        return sorted(entry.name for entry in Path(path).iterdir())

    def automatic(total_limit=None, count=3):
        root = tempfile.mkdtemp()
        config = ProjectConfiguration(root, automatic_checkpoint_naming=True, total_limit=total_limit)
        accelerator = fresh(project_config=config)
        accelerator.prepare(linear())
        for _ in range(count):
            accelerator.save_state()
        return [names(Path(root, "checkpoints")), accelerator.save_iteration]

    def with_hooks():
        accelerator = fresh()
        accelerator.prepare(linear())
        calls = []
        saved = accelerator.register_save_state_pre_hook(
            lambda models, weights, output_dir: calls.append(
                ["save", len(models), len(weights), type(output_dir).__name__]
            )
        )
        loaded = accelerator.register_load_state_pre_hook(
            lambda models, input_dir: calls.append(["load", len(models), type(input_dir).__name__])
        )
        path = tempfile.mkdtemp()
        accelerator.save_state(path)
        accelerator.load_state(path)
        saved.remove()
        loaded.remove()
        accelerator.save_state(path)
        accelerator.load_state(path)
        return calls

    def whole():
        accelerator = fresh()
        model = linear()
        counter = Counter()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        accelerator.register_for_checkpointing(counter)
        counter.count = 7
        accelerator.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        schedule.step()
        path = accelerator.save_state(str(folder / "whole"))
        weights = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        counter.count = 0
        accelerator.load_state(str(folder / "whole"))
        momentum = next(iter(optimizer.state.values()))["momentum_buffer"]
        return [
            type(path).__name__,
            bool((model.weight == weights).all()),
            counter.count,
            momentum,
            schedule.get_last_lr(),
        ]

    def saved_model(**options):
        path = tempfile.mkdtemp()
        fresh().save_model(nn.Sequential(linear(), linear()), path, **options)
        return names(path)

    def tied():
        model = nn.Sequential(linear(), linear())
        model[1].weight = model[0].weight
        path = tempfile.mkdtemp()
        fresh().save_model(model, path)
        from safetensors.torch import load_file

        return sorted(load_file(Path(path, "model.safetensors")))

    def object_file(value, **options):
        path = Path(tempfile.mkdtemp(), "file")
        fresh().save(value, path, **options)
        return sorted(load(path)) if not options else path.stat().st_size > 0

    (folder / "file").write_text("x", encoding="utf-8")
    return ask({
        "a whole run": whole,
        "automatic names": automatic,
        "a limit": lambda: automatic(2, 4),
        "hooks": with_hooks,
        "no name": lambda: fresh().save_state(),
        "load without a name": lambda: fresh().load_state(),
        "load what is not there": lambda: fresh().load_state(folder / "nothing"),
        "load a file": lambda: fresh().load_state(folder / "file"),
        "register a number": lambda: fresh().register_for_checkpointing(3),
        "register half an object": lambda: fresh().register_for_checkpointing(Half()),
        "register nothing": lambda: fresh().register_for_checkpointing(),
        "a model": saved_model,
        "a model in parts": lambda: saved_model(max_shard_size=30),
        "a model for torch": lambda: saved_model(safe_serialization=False),
        "a model in a file's place": lambda: fresh().save_model(linear(), folder / "file"),
        "a size that is none": lambda: saved_model(max_shard_size="big"),
        "tied weights": tied,
        "an object": lambda: object_file({"a": 1, "b": [2]}),
        "tensors": lambda: object_file({"a": torch.ones(2)}, safe_serialization=True),
        "an object as tensors": lambda: object_file({"a": 1}, safe_serialization=True),
        "save on every node": lambda: save({"a": 1}, folder / "node", save_on_each_node=True),
        "state dict": lambda: sorted(fresh().get_state_dict(fresh().prepare(linear()))),
        "state dict of another": lambda: sorted(fresh().get_state_dict(linear())),
    })  # fmt: skip


class Half:
    """An object with half of what a state needs."""

    def state_dict(self):
        return {}


# -- loaders ---------------------------------------------------------------------------------------------------


class Texts(Dataset):
    """Rows of text."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {"text": f"row {index}", "number": index}


def loading():
    from accelerate import skip_first_batches
    from accelerate.data_loader import DataLoaderShard, prepare_data_loader

    def prepared(*arguments, **options):
        return fresh().prepare(rows(*arguments, **options))

    def sizes(loader):
        return [batch[0].shape[0] for batch in loader]

    def broken():
        loader = prepared(10, 2)
        for _ in loader:
            break
        state = GradientState()
        return [state.in_dataloader, state.end_of_dataloader, len(sizes(loader))]

    def nested():
        accelerator = fresh()
        outer, inner = accelerator.prepare(rows(4, 2), rows(5, 2))
        seen = []
        for _ in outer:
            for _ in inner:
                seen.append([accelerator.gradient_state.end_of_dataloader, accelerator.gradient_state.remainder])
            seen.append([accelerator.gradient_state.end_of_dataloader, accelerator.gradient_state.remainder])
        return seen

    def gathered(count, **options):
        accelerator = fresh()
        loader = accelerator.prepare(rows(count, 4))
        return [len(accelerator.gather_for_metrics(batch[0], **options)) for batch in loader]

    def shared(count, size, **options):
        return sizes(prepare_data_loader(rows(count, size), num_processes=2, process_index=1, **options))

    def skipped(number, **options):
        return sizes(skip_first_batches(prepared(10, 2, **options), number))

    return ask({
        "length": lambda: len(prepared(10, 4)),
        "sizes": lambda: sizes(prepared(10, 4)),
        "drop last": lambda: sizes(prepared(10, 4, drop_last=True)),
        "attributes": lambda: [prepared().total_batch_size, prepared().total_dataset_length, prepared().batch_size,
                               len(prepared().dataset)],
        "kinds": lambda: [isinstance(prepared(), DataLoader), isinstance(prepared(), DataLoaderShard)],
        "sampler": lambda: [type(prepared().sampler).__name__, type(prepared(shuffle=True).sampler).__name__],
        "batch sampler": lambda: type(prepared().batch_sampler).__name__,
        "text": lambda: [list(batch) for batch in fresh().prepare(DataLoader(Texts(), batch_size=2))],
        "text values": lambda: [batch["text"] for batch in fresh().prepare(DataLoader(Texts(), batch_size=2))],
        "no batches": lambda: [type(row).__name__ for row in fresh().prepare(DataLoader(Texts(), batch_size=None))],
        "broken off": broken,
        "one in another": nested,
        "gathered": lambda: gathered(10),
        "gathered objects": lambda: gathered(10, use_gather_object=True),
        "skip none": lambda: skipped(0),
        "skip two": lambda: skipped(2),
        "skip all": lambda: skipped(5),
        "skip more": lambda: skipped(9),
        "skip by the accelerator": lambda: sizes(fresh().skip_first_batches(rows(10, 2), num_batches=3)),
        "skip a plain loader": lambda: type(skip_first_batches(rows(10, 2), 1)).__name__,
        "set epoch": lambda: prepared().set_epoch(3),
        "shuffled": lambda: [torch.manual_seed(3) and None, sizes(prepared(shuffle=True))],
        "an iterator of a list": lambda: fresh().prepare([1, 2]),
        "an empty dataset": lambda: sizes(prepared(0, 2)),
        "a loader of one row": lambda: [batch[0] for batch in prepared(1, 4)],
        "by function": lambda: shared(10, 4),
        "by function, split": lambda: shared(10, 4, split_batches=True),
        "by function, split unevenly": lambda: shared(10, 3, split_batches=True),
        "by function, not even": lambda: shared(10, 4, even_batches=False),
        "by function, too many": lambda: sizes(prepare_data_loader(rows(3, 4), num_processes=4, process_index=3)),
    })  # fmt: skip


# -- decorators, logs, trackers --------------------------------------------------------------------------------


def processes():
    from accelerate.logging import get_logger

    accelerator = fresh()
    state = PartialState()

    def decorated(decorate):
        @decorate
        def double(number, plus=0):
            return 2 * number + plus

        return [double(3), double(3, plus=1)]

    def logged(**options):
        stream = io.StringIO()
        logger = get_logger("surface", log_level="INFO")
        handler = logging.StreamHandler(stream)
        logger.logger.addHandler(handler)
        logger.info("said", **options)
        logger.debug("not said")
        logger.logger.removeHandler(handler)
        return stream.getvalue()

    def without_state():
        AcceleratorState._reset_state(reset_partial_state=True)
        return get_logger("surface").info("x")

    def printed(function):
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream):
            function("a", 1, sep="-")
        return stream.getvalue()

    def split(value, **options):
        with accelerator.split_between_processes(value, **options) as part:
            return part

    return ask({
        "on main": lambda: decorated(accelerator.on_main_process),
        "on main, called": lambda: decorated(accelerator.on_main_process()),
        "on local main": lambda: decorated(accelerator.on_local_main_process),
        "on local main, called": lambda: decorated(accelerator.on_local_main_process()),
        "on last": lambda: decorated(accelerator.on_last_process),
        "on process": lambda: decorated(accelerator.on_process(process_index=0)),
        "on another process": lambda: decorated(accelerator.on_process(process_index=1)),
        "on process by function": lambda: decorated(lambda function: accelerator.on_process(function, 0)),
        "on local process": lambda: decorated(accelerator.on_local_process(local_process_index=0)),
        "of the state": lambda: [decorated(state.on_main_process), decorated(state.on_last_process)],
        "of the state, called": lambda: decorated(state.on_main_process()),
        "print": lambda: printed(accelerator.print),
        "print of the state": lambda: printed(state.print),
        "log": logged,
        "log on all": lambda: logged(main_process_only=False),
        "log in order": lambda: logged(main_process_only=False, in_order=True),
        "log without a state": without_state,
        "split a list": lambda: split([1, 2, 3]),
        "split a dict": lambda: split({"a": [1, 2], "b": torch.arange(2)}),
        "split with padding": lambda: split([1, 2, 3], apply_padding=True),
        "first": lambda: contextlib.ExitStack().enter_context(accelerator.main_process_first()),
        "wait": lambda: accelerator.wait_for_everyone(),
        "trigger": lambda: [accelerator.check_trigger(), accelerator.set_trigger(), accelerator.check_trigger(),
                            accelerator.check_trigger()],
        "gather": lambda: accelerator.gather(torch.ones(2)),
        "gather a number": lambda: accelerator.gather(3),
        "gather text": lambda: accelerator.gather({"a": "b"}),
        "reduce": lambda: accelerator.reduce(torch.ones(2), "mean"),
        "reduce by another word": lambda: accelerator.reduce(torch.ones(2), "product"),
        "pad": lambda: accelerator.pad_across_processes(torch.ones(2, 3), dim=1),
        "end": lambda: accelerator.end_training(),
    })  # fmt: skip


def trackers():
    from accelerate.tracking import GeneralTracker, on_main_process

    class Kept(GeneralTracker):
        name, requires_logging_directory, main_process_only = "kept", False, True

        def __init__(self, run_name="run"):
            super().__init__()
            self.run_name, self.calls = run_name, []

        @property
        def tracker(self):
            return self.calls

        @on_main_process
        def store_init_configuration(self, values):
            self.calls.append(["config", values])

        @on_main_process
        def log(self, values, step=None, **kwargs):
            self.calls.append(["log", values, step, kwargs])

        @on_main_process
        def finish(self):
            self.calls.append(["finish"])

    class Nameless(GeneralTracker):
        pass

    def used():
        tracker = Kept()
        accelerator = fresh(log_with=tracker)
        accelerator.init_trackers("project", config={"lr": 1})
        accelerator.log({"loss": 1.0}, step=3)
        accelerator.log({"loss": 2.0}, log_kwargs={"kept": {"more": 1}})
        return [accelerator.get_tracker("kept") is tracker, accelerator.get_tracker("kept", unwrap=True),
                accelerator.end_training(), list(tracker.calls)]  # fmt: skip

    def unknown():
        accelerator = fresh(log_with=Kept())
        accelerator.init_trackers("project")
        return accelerator.get_tracker("other")

    def tensorboard():
        folder = tempfile.mkdtemp()
        accelerator = fresh(log_with="tensorboard", project_dir=folder)
        accelerator.init_trackers("project", config={"lr": 1})
        accelerator.log({"loss": 1.0}, step=0)
        accelerator.end_training()
        events = [path for path in Path(folder).rglob("*") if "events" in path.name]
        return sorted({path.parent.name for path in events if not path.parent.name[0].isdigit()})

    return ask({
        "used": used,
        "unknown": unknown,
        "nameless": lambda: fresh(log_with=Nameless()),
        "tensorboard": tensorboard,
        "tensorboard without a folder": lambda: fresh(log_with="tensorboard").init_trackers("project"),
        "all": lambda: [fresh(log_with="all", project_dir=tempfile.mkdtemp()).log_with == [], True],
        "log before": lambda: fresh().log({"a": 1}),
        "no trackers": lambda: list(fresh().trackers),
    })  # fmt: skip


# -- classes of arguments --------------------------------------------------------------------------------------


def configs():
    from accelerate import utils
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig, load_config_from_file
    from accelerate.utils import ParallelismConfig, write_basic_config

    folder = Path(tempfile.mkdtemp())
    (folder / "wrong.yaml").write_text("compute_environment: LOCAL_MACHINE\nwheels: 4\n", encoding="utf-8")
    (folder / "none.yaml").write_text("", encoding="utf-8")
    (folder / "right.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\n"
        "use_cpu: true\ndebug: false\n",
        encoding="utf-8",
    )

    def axes(**sizes):
        config = ParallelismConfig(**sizes)
        enabled = [
            config.dp_replicate_enabled,
            config.dp_shard_enabled,
            config.tp_enabled,
            config.cp_enabled,
            config.sp_enabled,
        ]
        sizes = [config.total_size, config.non_data_parallel_size, config.data_parallel_size]
        names = [config.dp_dim_names, config.non_dp_dim_names, config.dp_shard_cp_dim_names, config.dp_cp_dim_names]
        return [enabled, sizes, names, config.fsdp_dim_names, config.active_mesh_dims]

    def fsdp(**fields):
        plugin = utils.FullyShardedDataParallelPlugin(**fields)
        return [str(plugin.sharding_strategy), str(plugin.reshard_after_forward)]

    def hybrid():
        with utils.patch_environment(fsdp_sharding_strategy="HYBRID_SHARD_ZERO2"):
            return fsdp(fsdp_version=1)

    def bits(**fields):
        return str(utils.BnbQuantizationConfig(**fields).torch_dtype)

    def basic(**options):
        path = folder / f"{len(os.listdir(folder))}.json"
        written = write_basic_config(save_location=str(path), **options)
        return [bool(written), path.is_file(), write_basic_config(save_location=str(path), **options)]

    return ask({
        "handlers": lambda: [kind().to_kwargs() for kind in (
            utils.GradScalerKwargs, utils.DistributedDataParallelKwargs, utils.AutocastKwargs, utils.ProfileKwargs,
            utils.InitProcessGroupKwargs)],
        "changed handlers": lambda: [utils.GradScalerKwargs(growth_interval=5).to_kwargs(),
                                     utils.AutocastKwargs(enabled=False, cache_enabled=True).to_kwargs()],
        "dictionaries": lambda: [utils.GradScalerKwargs().to_dict(), utils.AutocastKwargs().to_dict()],
        "project": lambda: vars(utils.ProjectConfiguration("a", total_limit=2)),
        "loading": lambda: vars(utils.DataLoaderConfiguration(split_batches=True)),
        "window": lambda: utils.GradientAccumulationPlugin(num_steps=2).to_kwargs(),
        "dynamo": lambda: utils.TorchDynamoPlugin(backend="inductor", mode="reduce-overhead").to_kwargs(),
        "wrong dynamo": lambda: utils.TorchDynamoPlugin(backend="fast"),
        "axes": axes,
        "axes of two": lambda: axes(dp_replicate_size=2, tp_size=2),
        "axes of three": lambda: axes(dp_replicate_size=2, dp_shard_size=2, cp_size=2),
        "wrong axes": lambda: axes(tp_size=0),
        "cp and sp": lambda: axes(cp_size=2, sp_size=2),
        "mesh": lambda: ParallelismConfig(tp_size=2).get_mesh(),
        "representation of axes": lambda: repr(ParallelismConfig(tp_size=2)).count("\n") > 3,
        "a wrong file": lambda: load_config_from_file(str(folder / "wrong.yaml")),
        "an empty file": lambda: load_config_from_file(str(folder / "none.yaml")),
        "no file": lambda: load_config_from_file(str(folder / "nothing.yaml")),
        "a right file": lambda: [load_config_from_file(str(folder / "right.yaml")).to_dict()[key]
                                 for key in ("distributed_type", "num_processes", "mixed_precision", "use_cpu")],
        "cluster": lambda: ClusterConfig(compute_environment="LOCAL_MACHINE", distributed_type="NO", mixed_precision="no",
                                         use_cpu=True, debug=False).to_dict(),
        "cluster without": lambda: ClusterConfig(),
        "sagemaker": lambda: type(SageMakerConfig(compute_environment="AMAZON_SAGEMAKER", distributed_type="NO",
                                                  mixed_precision="no", use_cpu=False, debug=False, ec2_instance_type="x",
                                                  iam_role_name="y")).__name__,
        "basic": lambda: basic(),
        "basic, half": lambda: basic(mixed_precision="bf16"),
        "basic, wrong": lambda: basic(mixed_precision="half"),
        "fsdp words": lambda: [str(utils.FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=word).state_dict_type)
                               for word in ("FULL_STATE_DICT", "sharded_state_dict")],
        "fsdp hybrid": hybrid,
        "fsdp 2, prefetch": lambda: fsdp(fsdp_version=2, forward_prefetch=True),
        "fsdp 2, wrong prefetch": lambda: fsdp(fsdp_version=2, backward_prefetch="SIDEWAYS"),
        "fsdp 2, a number": lambda: fsdp(fsdp_version=2, reshard_after_forward=3),
        "bits": lambda: [bits(load_in_8bit=True), bits(load_in_4bit=True), bits(load_in_8bit=True, torch_dtype="fp32"),
                         bits(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")],
        "bits, twice": lambda: bits(load_in_4bit=True, bnb_4bit_use_double_quant="yes"),
        "bits, threshold": lambda: bits(load_in_8bit=True, llm_int8_threshold="high"),
        "fsdp wrong word": lambda: utils.FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="HALF"),
        "enumerations": lambda: [str(utils.DistributedType.FSDP), utils.DistributedType.NO == "NO",
                                 utils.PrecisionType.list(), "fp16" in utils.PrecisionType, utils.RNGType("torch").value],
        "wrong member": lambda: utils.LoggerType("paper"),
    })  # fmt: skip


def utilities():
    from accelerate import find_executable_batch_size, utils
    from accelerate.local_sgd import LocalSGD
    from accelerate.utils import imports

    def batch_sizes(function, **options):
        sizes = []

        @find_executable_batch_size(starting_batch_size=16, **options)
        def run(batch_size):
            sizes.append(batch_size)
            return function(batch_size)

        return [run(), sizes]

    def fail(batch_size):
        if batch_size > 4:
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    def other(batch_size):
        raise ValueError("no")

    def wrong_arguments():
        @find_executable_batch_size(starting_batch_size=16)
        def run(batch_size, more):
            return batch_size

        return run(8, 3)

    def local_sgd(**options):
        accelerator = fresh()
        model = accelerator.prepare(linear())
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, **options) as local:
            local.step()
            return local.enabled

    def parsed(arguments):
        from accelerate.commands.launch import launch_command_parser

        return vars(launch_command_parser().parse_args(arguments))["training_script"]

    def patched():
        with utils.patch_environment(surface_a=1, SURFACE_B="x"):
            inside = [os.environ.get("SURFACE_A"), os.environ.get("SURFACE_B")]
        return [inside, os.environ.get("SURFACE_A")]

    def loader_alone():
        from accelerate.data_loader import prepare_data_loader

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        state = GradientState()
        seen = [[state.in_dataloader, state.end_of_dataloader, state.remainder] for _ in prepare_data_loader(rows())]
        fresh()
        return [seen, state.in_dataloader]

    def empty():
        from accelerate import init_empty_weights

        with utils.patch_environment(accelerate_init_include_buffers="1"), init_empty_weights():
            return nn.BatchNorm1d(2).running_mean.is_meta

    Pair = collections.namedtuple("Pair", "a b")
    layers = nn.ModuleDict({"a": linear(), "b": nn.ModuleList([linear()])})
    return ask({
        "batch sizes": lambda: batch_sizes(fail),
        "no batch size": lambda: batch_sizes(lambda size: fail(99)),
        "another error": lambda: batch_sizes(other),
        "wrong arguments": wrong_arguments,
        "own reduction": lambda: batch_sizes(fail, reduce_batch_size_fn=lambda: 4),
        "local sgd": local_sgd,
        "local sgd off": lambda: local_sgd(enabled=False),
        "environment": patched,
        "loader without an accelerator": loader_alone,
        "buffers without values": empty,
        "versions of packages": lambda: [imports.is_numpy_available(), imports.is_numpy_available("99.0")],
        "truth": lambda: [utils.str_to_bool("yes"), utils.str_to_bool("Off"), utils.str_to_bool("1")],
        "no truth": lambda: utils.str_to_bool("maybe"),
        "versions": lambda: [utils.compare_versions("torch", ">", "1.0"), utils.is_torch_version("<", "1.0")],
        "wrong comparison": lambda: utils.compare_versions("torch", "=>", "1.0"),
        "unknown package": lambda: utils.compare_versions("no_such_package", ">", "1.0"),
        "merged": lambda: utils.merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}, "d": 3}),
        "named tuple": lambda: utils.send_to_device(Pair(torch.ones(1), [torch.ones(1)]), "cpu"),
        "converted": lambda: str(utils.convert_to_fp32({"a": torch.ones(1, dtype=torch.bfloat16)})["a"].dtype),
        "device of": lambda: str(utils.find_device([{"a": 3}, torch.ones(1)])),
        "no device": lambda: utils.find_device([3]),
        "batch size of": lambda: [utils.find_batch_size({"a": torch.ones(4, 2)}), utils.find_batch_size([torch.ones(3)])],
        "no batch size of": lambda: utils.find_batch_size([]),
        "shapes": lambda: utils.get_data_structure({"a": torch.ones(2, 3)}) and True,
        "sliced": lambda: utils.slice_tensors({"a": torch.arange(4)}, slice(1, 3)),
        "joined": lambda: utils.concatenate([{"a": torch.ones(1)}, {"a": torch.zeros(1)}]),
        "joined, wrong": lambda: utils.concatenate([3, 4]),
        "listed": lambda: utils.listify({"a": torch.ones(2)}),
        "pretty": lambda: [utils.get_pretty_name(linear()), utils.get_pretty_name(linear)],
        "ports": lambda: [utils.is_port_in_use(1), isinstance(utils.is_port_in_use(), bool)],
        "sizes": lambda: [utils.convert_bytes(0), utils.convert_bytes(3_000_000), utils.convert_file_size_to_int("2KiB")],
        "element sizes": lambda: [utils.dtype_byte_size(kind) for kind in KINDS],
        "no element size": lambda: utils.dtype_byte_size("float32"),
        "modules": lambda: dict(utils.compute_module_sizes(layers)),
        "tied": lambda: utils.find_tied_parameters(nn.Sequential(linear(), linear())),
        "availability": lambda: [imports.is_cuda_available(), imports.is_rich_available.__name__, imports.is_mps_available(),
                                 imports.is_bf16_available(), imports.is_megatron_lm_available(), imports.is_bnb_available()],
        "seed": lambda: [utils.set_seed(4), float(torch.rand(1))],
        "seed by device": lambda: [utils.set_seed(4, device_specific=True), float(torch.rand(1))],
        "seed, deterministic": lambda: [utils.set_seed(4, deterministic=True), torch.are_deterministic_algorithms_enabled(),
                                        torch.use_deterministic_algorithms(False)],
        "wrong seed": lambda: utils.set_seed("x"),
        "released": lambda: utils.release_memory(linear(), 3),
        "unwrapped": lambda: type(utils.extract_model_from_parallel(linear())).__name__,
        "script": lambda: parsed(["--cpu", "train.py", "--lr", "1"]),
        "copied module": lambda: type(copy.deepcopy(fresh().prepare(linear()))).__name__,
    })  # fmt: skip


def hooking():
    from accelerate import cpu_offload, hooks

    class Doubling(hooks.ModelHook):
        def pre_forward(self, module, *arguments, **named):
            return [2 * argument for argument in arguments], named

        def post_forward(self, module, output):
            return output + 1

    def outcome(change, **options):
        layer = linear()
        hooks.add_hook_to_module(layer, Doubling(), **options)
        change(layer)
        return layer(torch.ones(1, 3))

    def chained():
        layer = linear()
        hooks.add_hook_to_module(layer, Doubling())
        hooks.add_hook_to_module(layer, Doubling(), append=True)
        return [type(layer._hf_hook).__name__, len(layer._hf_hook.hooks), layer(torch.ones(1, 3))]

    def offloaded():
        model = nn.Sequential(linear(), nn.ReLU())
        cpu_offload(model, execution_device="cpu")
        return [str(model[0].weight.device), model(torch.ones(1, 3))]

    return ask({
        "one": lambda: outcome(lambda layer: None),
        "removed": lambda: outcome(hooks.remove_hook_from_module),
        "replaced": lambda: outcome(lambda layer: hooks.add_hook_to_module(layer, hooks.ModelHook())),
        "two": chained,
        "removed from all": lambda: outcome(hooks.remove_hook_from_submodules),
        "wrong hook": lambda: hooks.add_hook_to_module(linear(), 3)(torch.ones(1, 3)),
        "in a sequence": lambda: len(hooks.SequentialHook(Doubling(), Doubling()).hooks),
        "offloaded": offloaded,
        "name of forward": lambda: hooks.add_hook_to_module(linear(), Doubling()).forward.__name__,
        "pickled names": lambda: sorted(name for name in vars(hooks.add_hook_to_module(linear(), Doubling())) if "hook" in name
                                        and name.startswith("_hf")),
    })  # fmt: skip


TOPICS = (constructors, preparing, stepping, saving, loading, processes, trackers, configs, utilities, hooking)


def everything():
    """Answers by topic and question."""
    return {topic.__name__: topic() for topic in TOPICS}
