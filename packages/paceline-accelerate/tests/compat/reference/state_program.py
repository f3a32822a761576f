"""Many small questions to accelerate's states, operations and utilities; one file for the real library and for ours.

    python record_state.py      (an environment with the real accelerate 1.15.0)   -> recorded_state.json
    test_state.py               under `paceline.compat`                            -> compared with recorded_state.json

`everything()` gives a dictionary of answers. An error is told by the Python classes that a script would catch it as. What
we mean to do differently is not asked.
"""

import collections
import contextlib
import copy
import os
import pickle
import threading
import warnings

import accelerate
import torch
from accelerate import Accelerator, PartialState
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, ThreadLocalSharedDict, is_initialized
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch import nn
from torch.utils.data import DataLoader

Pair = collections.namedtuple("Pair", "a b")


class Movable:
    def to(self, device):
        return f"moved to {device}"


def shown(value):
    """A value as plain JSON, with the kinds of its containers."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return {kind: f"meta {list(value.shape)}" if value.is_meta else rounded(value.tolist())}
    if isinstance(value, collections.abc.Mapping):
        return {f"{type(value).__name__} {key}": shown(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *[shown(each) for each in value]]
    if isinstance(value, (bool, int, str, type(None))):
        return value
    return round(value, 5) if isinstance(value, float) else str(value)


def rounded(value):
    return [rounded(each) for each in value] if isinstance(value, list) else shown(value)


def answer(question):
    """What a question gives, or the built-in classes of its error."""
    try:
        return shown(question())
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return {"raises": kinds[: kinds.index("Exception") + 1]}


def answers(**questions):
    return {name: answer(question) for name, question in questions.items()}


def made(loader=False, **options):
    """A new accelerator in a process that has forgotten the others."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


# -- states --------------------------------------------------------------------------------------------------


def after(change, question):
    change()
    return question()


def states():
    """Before an accelerator, with one, and after a reset."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    found = answers(
        shared=lambda: [PartialState._shared_state, AcceleratorState._shared_state, GradientState._shared_state],
        known=lambda: [PartialState._known_attrs, AcceleratorState._known_attrs],
        initialized=is_initialized,
    )
    process = PartialState(cpu=True)
    found["missing"] = answer(AcceleratorState)
    AcceleratorState._reset_state()
    gradient = GradientState()
    names = ("num_processes process_index local_process_index backend debug fork_launched distributed_type initialized "
             "use_distributed is_last_process is_main_process is_local_main_process _mixed_precision nothing")  # fmt: skip
    for name in names.split():
        found[f"process {name}"] = answer(lambda name=name: getattr(process, name))
    names = ("sync_gradients num_steps adjust_scheduler sync_with_dataloader initialized end_of_dataloader remainder "
             "in_dataloader is_xla_gradients_synced active_dataloader dataloader_references plugin_kwargs")  # fmt: skip
    for name in names.split():
        found[f"gradient {name}"] = answer(lambda name=name: getattr(gradient, name))
    found |= answers(
        represented=lambda: repr(process).replace("cpu:0", "cpu"),
        settable=lambda: after(lambda: setattr(process, "debug", True), lambda: PartialState().debug),
        own=lambda: after(lambda: setattr(process, "mine", 3), lambda: PartialState().mine),
        back=lambda: after(lambda: setattr(process, "debug", False), lambda: process.debug),
        steps=lambda: [GradientState(GradientAccumulationPlugin(num_steps=4)).num_steps, gradient.num_steps],
        sync=lambda: after(lambda: setattr(gradient, "sync_gradients", False), lambda: GradientState().sync_gradients),
        set_sync=lambda: after(lambda: gradient._set_sync_gradients(True), lambda: GradientState().sync_gradients),
        unsettable=lambda: setattr(gradient, "remainder", 3),
        pickled=lambda: pickle.loads(pickle.dumps(process)).num_processes,
    )
    accelerator = made()
    state = accelerator.state
    names = ("mixed_precision deepspeed_plugin fsdp_plugin use_ipex is_fsdp2 initialized num_processes deepspeed_plugins "
             "torch_tp_plugin parallelism_config device_mesh megatron_lm_plugin use_distributed")  # fmt: skip
    for name in names.split():
        found[f"state {name}"] = answer(lambda name=name: getattr(state, name))
    found |= answers(
        is_initialized=is_initialized,
        shares=lambda: vars(state) is AcceleratorState._shared_state,
        other_precision=lambda: AcceleratorState(mixed_precision="fp16"),
        other_accelerator=lambda: Accelerator(mixed_precision="bf16"),
        same_precision=lambda: [AcceleratorState(mixed_precision="no").mixed_precision, Accelerator().mixed_precision],
        unknown_plugin=lambda: state.get_deepspeed_plugin("a"),
        select_plugin=lambda: state.select_deepspeed_plugin("a"),
        set_device=lambda: process.set_device(),
        unknown_precision=lambda: made(mixed_precision="fp77"),
        from_environment=from_environment,
    )
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return found | answers(
        old_precision=lambda: state.mixed_precision,
        old_number=lambda: process.num_processes,
        old_own=lambda: process.mine,
        old_gradient=lambda: gradient.sync_gradients,
        old_initialized=lambda: [process.initialized, is_initialized()],
        threads=threads,
    )


def from_environment():
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    try:
        made()
        return [Accelerator().mixed_precision, AcceleratorState().mixed_precision]
    finally:
        del os.environ["ACCELERATE_MIXED_PRECISION"]


def threads():
    class Holder:
        shared = ThreadLocalSharedDict()

    seen = []
    Holder().shared["a"] = 1

    def other_thread():
        Holder().shared["b"] = 2
        seen.append(dict(Holder.shared))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    Holder().shared = {"c": 3}
    return [*seen, Holder.shared]


# -- an accelerator ------------------------------------------------------------------------------------------


def split(owner, inputs, **options):
    with owner.split_between_processes(inputs, **options) as part:
        return part


def accelerators():
    """Its attributes, decorators, parts, flags, and what it refuses."""
    accelerator = made()
    rank, size = accelerator.process_index, accelerator.num_processes
    found = {}
    names = ("dispatch_batches even_batches fp8_backend gradient_accumulation_steps is_composable_parallelism_enabled "
             "is_fsdp2 logging_dir mixed_precision multi_device non_blocking optimizer_step_was_skipped project_dir "
             "parallelism_config pipeline_parallel_rank context_parallel_rank save_iteration should_save_model split_batches "
             "sync_gradients torch_device_mesh tensor_parallel_rank use_distributed use_seedable_sampler "
             "use_stateful_dataloader step scaler rng_types native_amp has_lomo_optimizer fp8_enabled flag_tensor "
             "device_placement log_with te_recipe_handler nothing")  # fmt: skip
    for name in names.split():
        found[f"attribute {name}"] = answer(lambda name=name: getattr(accelerator, name))
    values = {
        "list": [1, 2, 3], "tuple": (1, 2, 3), "tensor": torch.arange(3), "rows": torch.arange(6).view(3, 2), "one": [1],
        "one tensor": torch.arange(1), "dict": {"a": [1, 2, 3], "b": torch.arange(3)}, "text": "abc", "range": range(3),
        "text inside": {"a": [1, 2, 3], "b": "abc"}, "uneven": {"a": [1, 2, 3], "b": [1, 2]}, "set": {1},
        "nested": {"a": {"x": [1], "y": [2, 3]}, "b": [4, 5]},
    }  # fmt: skip
    for name, value in values.items():
        for owner in (accelerator, accelerator.state, PartialState()):
            found[f"split {name} {type(owner).__name__}"] = answer(lambda o=owner, v=value: split(o, copy.deepcopy(v)))
        if name in ("list", "one"):  # of tensors ranks wait for each other there
            found[f"split {name} padded"] = answer(lambda v=value: split(accelerator, v, apply_padding=True))

    for owner in (accelerator, PartialState()):
        found |= decorated(owner)
    return found | answers(
        again=lambda: pickle.loads(pickle.dumps(accelerator)).num_processes,
        window=lambda: after(
            lambda: setattr(accelerator, "gradient_accumulation_steps", 3), lambda: GradientState().num_steps
        ),
        sync=lambda: after(
            lambda: setattr(accelerator, "sync_gradients", False), lambda: [GradientState().sync_gradients]
        ),
        unsettable=lambda: setattr(accelerator, "num_processes", 3),
        free=lambda: [accelerator.free_memory(1, 2), accelerator.clear(1), accelerator.free_memory()],
        nothing_to_save=lambda: accelerator.register_for_checkpointing(3),
        placement=lambda: accelerator.prepare(nn.Linear(1, 1), device_placement=[True, False]),
        unknown=lambda: accelerator.prepare(3, "x", None),
        lomo=lambda: accelerator.lomo_backward(torch.ones(1), 0.1),
        device_map=lambda: accelerator.verify_device_map(nn.Linear(1, 1)),
        trigger=lambda: after(accelerator.set_trigger if rank == size - 1 else int, accelerator.check_trigger),
        trigger_down=lambda: [accelerator.check_trigger(), accelerator.flag_tensor],
        reduced=lambda: [accelerator.reduce(torch.tensor([1.0 + rank])), accelerator.reduce(torch.ones(1), "mean")],
        maximum=lambda: accelerator.reduce({"a": torch.tensor([[1.0 + rank, 5 - rank]])}, "max"),
    )


def decorated(owner):
    """Functions that some processes run."""

    def run(x=1):
        return ["ran", x]

    found = answers(
        main=lambda: owner.on_main_process(run)(2),
        local_main=lambda: owner.on_local_main_process(run)(x=3),
        last=lambda: owner.on_last_process(run)(),
        second=lambda: owner.on_process(run, process_index=1)(),
        first=lambda: owner.on_process(process_index=0)(run)(),
        nobody=lambda: owner.on_process(run)(),
        local_second=lambda: owner.on_local_process(run, local_process_index=1)(),
        local_first=lambda: owner.on_local_process(local_process_index=0)(run)(),
    )
    return {f"{type(owner).__name__} {name}": value for name, value in found.items()}


def prepared():
    """What is known of prepared objects, and that they are prepared once."""
    accelerator = made()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(list(range(8)), batch_size=2)
    own = accelerator.prepare(model, optimizer, loader, scheduler)
    return answers(
        marks=lambda: [getattr(each, "_is_accelerate_prepared", None) for each in own],
        unmarked=lambda: [getattr(each, "_is_accelerate_prepared", None) for each in (optimizer, scheduler)],
        once=lambda: [accelerator.prepare(each) is each for each in own],
        counts=lambda: [len(accelerator._optimizers), len(accelerator._schedulers), len(accelerator._dataloaders)],
        names=lambda: [type(own[1]).__name__, type(own[3]).__name__],
        loader_state=lambda: own[2].gradient_state.num_steps,
        unwrapped=lambda: accelerator.unwrap_model(own[0]) is model,
        pickled=lambda: [
            type(pickle.loads(pickle.dumps(own[1]))).__name__,
            pickle.loads(pickle.dumps(own[3])).step_with_optimizer,
        ],
        built=built,
    )


def built():
    """An optimizer and a scheduler that a script wraps itself."""
    model = nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = accelerate.optimizer.AcceleratedOptimizer(inner)
    scheduler = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(inner, 1), optimizer, split_batches=True)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    scheduler.step()
    return [scheduler.get_last_lr(), optimizer.step_was_skipped]


# -- the loop ------------------------------------------------------------------------------------------------


def schedule(times, kind="cycle", **options):
    """Learning rates, past the end of the schedule too."""
    accelerator = made(**options)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=4)
    if kind == "cycle":
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=4)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for _ in range(times):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def weight_of(accelerator, model):
    return accelerator.unwrap_model(model).weight


def windows(**options):
    """Gradients in each micro-batch of two windows."""
    accelerator = made(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, **options))
    model = nn.Linear(1, 1, bias=False)
    model = accelerator.prepare(model)
    seen = []
    for number in range(4):
        with accelerator.accumulate(model):
            value = number + 1 + 10 * accelerator.process_index
            accelerator.backward(model(torch.full((1, 1), float(value))).sum())
            weight = weight_of(accelerator, model)
            seen.append([accelerator.sync_gradients, weight.grad.item(), accelerator.step])
            if accelerator.sync_gradients:
                weight.grad = None
    return seen


def plain(times=2):
    """`loss.backward()` without the accelerator."""
    accelerator = made()
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(0.0)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
    seen = []
    for number in range(times):
        model(torch.full((1, 1), 1.0 + number + accelerator.process_index)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(weight_of(accelerator, model).item())
    return seen


def plain_of_another_library(held=1):
    """`loss.backward()`, and an optimizer of another library, which reads the gradients at once and detaches them in place."""
    accelerator = made()
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(1.0)
    model = accelerator.prepare(module)
    seen = []
    for number in range(4):
        inputs = torch.full((1, 1), 1.0 + number + accelerator.process_index)
        with accelerator.no_sync(model) if number == held else contextlib.nullcontext():
            model(inputs).sum().backward()
        gradient = module.weight.grad
        seen.append(gradient.item())
        gradient.detach_()
        if number != held:
            gradient.zero_()
    return seen


def triggered():
    """A backward pass that averages although its forward pass was run in `no_sync`."""
    accelerator = made()
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    values = torch.full((1, 1), 1.0 + accelerator.process_index)
    seen = []
    with accelerator.no_sync(model):
        accelerator.backward(model(values).sum())
    seen.append(weight_of(accelerator, model).grad.item())
    with accelerator.no_sync(model):
        loss = model(values).sum()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    seen.append(weight_of(accelerator, model).grad.item())
    accelerator.backward(model(values).sum())
    return [*seen, weight_of(accelerator, model).grad.item()]


def metrics():
    """`gather_for_metrics` of all kinds of values, over a last batch that is not full."""
    accelerator = made()
    loader = accelerator.prepare(DataLoader(list(range(5)), batch_size=2))
    seen = []
    for batch in loader:
        rows = [int(row) for row in batch]
        values = [
            batch,
            batch.sum(),
            {"a": batch, "b": batch.float().mean()},
            (batch, batch.unsqueeze(1)),
            torch.zeros(7),
        ]
        gathered = [accelerator.gather_for_metrics(value) for value in values]
        gathered += [accelerator.gather_for_metrics(rows), accelerator.gather_for_metrics("ab")]
        gathered += [accelerator.gather_for_metrics([{"row": row} for row in rows], use_gather_object=True)]
        state = accelerator.gradient_state
        seen.append([shown(gathered), state.remainder, state.end_of_dataloader])
    return seen


def loops():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return answers(
            cycle=lambda: schedule(6),
            linear=lambda: schedule(6, "linear"),
            split=lambda: schedule(6, dataloader_config=DataLoaderConfiguration(split_batches=True)),
            always=lambda: schedule(6, step_scheduler_with_optimizer=False),
            windows=windows,
            each=lambda: windows(sync_each_batch=True),
            plain=plain,
            plain_of_another_library=plain_of_another_library,
            plain_held_first=lambda: plain_of_another_library(held=0),
            triggered=triggered,
            metrics=metrics,
        )


def everything():
    """All of it, by name."""
    import edges_program
    import utilities_program

    found = {"states": states(), "accelerators": accelerators(), "prepared": prepared(), "loops": loops()}
    made()
    return found | utilities_program.everything() | edges_program.everything()
