"""Small programs over accelerate's interface; the same file runs under the real library and under ours.

    python record.py        (an environment with the real accelerate 1.15.0)   -> recorded.json, checkpoint/
    test_reference.py       under `paceline.compat`                            -> compared with recorded.json

Each program returns plain values that must be the same. What we mean to do differently is not recorded here.
"""

import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import (
    GradientAccumulationPlugin,
    ProjectConfiguration,
    broadcast,
    broadcast_object_list,
    concatenate,
    gather,
    gather_object,
    honor_type,
    listify,
    pad_across_processes,
    recursively_apply,
    reduce,
    send_to_device,
    set_seed,
)
from safetensors import safe_open
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Points(Dataset):
    """x = i / n, y = 3 x + 1, and the index i."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.tensor([index / self.count])
        return {"x": x, "y": 3 * x + 1, "index": torch.tensor(index)}


class Stream(IterableDataset):
    """The same points, one after another."""

    def __init__(self, count):
        self.points = Points(count)

    def __iter__(self):
        return (self.points[index] for index in range(len(self.points)))


def numbers(value):
    """Plain values, rounded to what float32 sums agree on."""
    if isinstance(value, torch.Tensor):
        return numbers(value.tolist())
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {str(key): numbers(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [numbers(each) for each in value]
    return value


def model_of(seed=3):
    set_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def train(count=21, batch=4, accumulate=1, epochs=2, clip=None, schedule="linear", **options):
    """A training loop; the last global batch is filled up, a window may end early."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    loader = DataLoader(Points(count), batch_size=batch)
    if schedule == "cycle":
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.3, epochs=epochs, steps_per_epoch=len(loader)
        )
    else:
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen = {"length": len(loader), "total_batch_size": loader.total_batch_size, "steps": []}
    for _ in range(epochs):
        for row in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(row["x"]), row["y"])
                accelerator.backward(loss)
                norm = None
                if clip and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen["steps"].append(
                numbers(
                    {
                        "rows": accelerator.gather(row["index"]),
                        "losses": accelerator.gather(loss.detach()),
                        "rate": scheduler.get_last_lr()[0],
                        "sync": accelerator.sync_gradients,
                        "norm": norm,
                    }
                )
            )
    seen["weights"] = numbers(accelerator.get_state_dict(model))
    return seen


def metrics(count):
    """What an evaluation loop gathers."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Points(count), batch_size=4))
    steps = []
    for row in loader:
        index, pair = accelerator.gather_for_metrics((row["index"], {"x": row["x"], "y": row["y"]}))
        words = accelerator.gather_for_metrics([f"row {int(each)}" for each in row["index"]], use_gather_object=True)
        mean = accelerator.gather_for_metrics(row["x"].mean()) if len(index) == 4 * accelerator.num_processes else None
        steps.append(numbers([index, list(pair["x"].shape), words, mean]))
    return steps


def repeated(count, **options):
    """What scripts do to weigh a mean by its rows: a loss for each row of a full batch, also of the last, smaller one."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Points(count), batch_size=4, **options))
    steps = []
    for row in loader:
        losses = accelerator.gather_for_metrics(row["x"].mean().repeat(4))
        words = accelerator.gather_for_metrics(["a", "b", "c", "d"], use_gather_object=True)
        steps.append(numbers([len(losses), len(words), accelerator.gradient_state.remainder]))
    return steps


def tied(folder):
    """Names in the file of a model with tied weights, and whether they are back, and still tied, after a load."""
    accelerator = Accelerator(cpu=True)
    set_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model = accelerator.prepare(model)
    accelerator.save_state(folder, safe_serialization=True)
    accelerator.wait_for_everyone()
    inside = accelerator.unwrap_model(model)
    before = inside[0].weight.detach().clone()
    with torch.no_grad():
        inside[0].weight.zero_()
    accelerator.load_state(folder)
    with safe_open(os.path.join(folder, "model.safetensors"), "pt") as file:
        names = sorted(file.keys())
    return [names, bool((inside[0].weight == before).all()), inside[1].weight is inside[0].weight]


def batches(count, batch, iterable=False, **options):
    """Which rows each process gets."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    data = Stream(count) if iterable else Points(count)
    loader = accelerator.prepare(DataLoader(data, batch_size=batch))
    mine = [row["index"].tolist() for row in loader]
    return gather_object([mine]) if accelerator.num_processes > 1 else [mine]


def own_windows():
    """Scripts that accumulate by themselves, under `no_sync`, without `accumulate`."""
    accelerator = Accelerator(cpu=True)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Points(16), batch_size=2))
    for number, row in enumerate(loader, 1):
        loss = torch.nn.functional.mse_loss(model(row["x"]), row["y"]) / 2
        if number % 2:
            with accelerator.no_sync(model):
                accelerator.backward(loss)
        else:
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return numbers(accelerator.get_state_dict(model))


def divided_outside():
    """`backward` outside `accumulate` divides all the same."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = accelerator.prepare(model_of())
    accelerator.backward(model(torch.ones(2, 1)).sum())
    return numbers([parameter.grad for parameter in accelerator.unwrap_model(model).parameters()])


def sync_options():
    """Windows that go on over the end of a loader."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, loader = accelerator.prepare(model_of(), DataLoader(Points(12), batch_size=4 // accelerator.num_processes))
    syncs = []
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate(model):
                syncs.append(accelerator.sync_gradients)
    return syncs


def operations():
    """Functions of `accelerate.utils`."""
    accelerator = Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    mine = torch.arange(2.0) + 10 * rank
    found = {
        "gather": gather({"a": mine, "b": (mine + 1,)}),
        "gather_0_dim": accelerator.gather(torch.tensor(float(rank))),
        "gather_object": gather_object([f"rank {rank}", rank]),
        "reduce": reduce(mine),
        "reduce_sum": accelerator.reduce([mine], reduction="sum"),
        "broadcast": broadcast(mine.clone(), from_process=size - 1),
        "broadcast_object_list": broadcast_object_list([rank, {"rank": rank}], from_process=size - 1),
        "pad": accelerator.pad_across_processes(torch.ones(rank + 1, 2), dim=0, pad_index=-1),
        "pad_first": pad_across_processes(torch.ones(rank + 1), pad_first=True),
        "concatenate": concatenate([{"a": mine}, {"a": mine + 5}]),
        "listify": listify({"a": mine}),
        "honor_type": type(honor_type((1, 2), iter([3, 4]))).__name__,
        "apply": recursively_apply(lambda t, by: t * by, [mine, "x"], 2) if rank < 0 else None,
        "sent": type(send_to_device({"a": [mine]}, "cpu")["a"]).__name__,
        "kind": [accelerator.distributed_type.value, str(accelerator.state.distributed_type.value)],
        "use_distributed": accelerator.use_distributed,
    }
    with accelerator.split_between_processes([1, 2, 3, 4, 5]) as part:
        found["split"] = gather_object([part]) if size > 1 else [part]
    with accelerator.split_between_processes(torch.arange(5), apply_padding=True) as part:
        found["split_padded"] = gather_object([part.tolist()]) if size > 1 else [part.tolist()]
    if rank == size - 1:
        accelerator.set_trigger()
    found["trigger"] = [accelerator.check_trigger(), accelerator.check_trigger()]
    return numbers(found)


class Counter:
    """Something to checkpoint."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def run_objects(folder, automatic=True):
    """Model, optimizer, scheduler and a counter, prepared."""
    config = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=automatic, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=config)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    counter = Counter()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(counter)
    return accelerator, model, optimizer, scheduler, counter


def step(accelerator, model, optimizer, scheduler, counter):
    """One optimizer step on fixed rows."""
    x = torch.tensor([[0.5], [1.0]])
    accelerator.backward(torch.nn.functional.mse_loss(model(x), 3 * x + 1))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    counter.count += 1


def checkpoints(folder):
    """Names of what `save_state` writes, and what is back after `load_state`."""
    accelerator, *things = objects = run_objects(folder)
    step(*objects)
    for _ in range(3):
        saved = accelerator.save_state(safe_serialization=True)
        accelerator.wait_for_everyone()
    random = numbers(torch.rand(2))
    after_save = numbers(accelerator.get_state_dict(things[0]))
    step(*objects)
    step(*objects)
    accelerator.load_state()
    kept = sorted(os.listdir(os.path.join(folder, "checkpoints")))
    hooks = []
    accelerator.register_save_state_pre_hook(lambda models, weights, where: hooks.append([len(models), len(weights)]))
    accelerator.register_load_state_pre_hook(lambda models, where: hooks.append(len(models)))
    named = os.path.join(folder, "named")
    accelerator.project_configuration.automatic_checkpoint_naming = False
    accelerator.save_state(named, safe_serialization=False)
    accelerator.wait_for_everyone()
    accelerator.load_state(named)
    return {
        "saved": os.path.basename(saved),
        "kept": kept,
        "files": sorted(os.listdir(saved)),
        "files_unsafe": sorted(os.listdir(named)),
        "random_again": numbers(torch.rand(2)) == random,
        "weights_again": numbers(accelerator.get_state_dict(things[0])) == after_save,
        "count": things[3].count,
        "rate": things[2].get_last_lr(),
        "hooks": hooks,
    }


def resume(folder):
    """Goes on from a checkpoint that was made elsewhere, with one step more."""
    objects = run_objects(folder)
    accelerator, model, _, scheduler, counter = objects
    accelerator.load_state(os.path.join(folder, "checkpoint"))
    first = numbers(torch.rand(2))
    step(*objects)
    return {
        "weights": numbers(accelerator.get_state_dict(model)),
        "rate": scheduler.get_last_lr(),
        "count": counter.count,
        "random": first,
    }


def everything(folder):
    """All programs; `folder` is empty and shared by the processes."""
    return {
        "train": train(),
        "train_accumulate": train(accumulate=2, clip=0.5),
        "train_accumulate_4": train(count=36, accumulate=4, epochs=1),
        "train_split": train(count=24, dataloader_config=DataLoaderConfiguration(split_batches=True)),
        "train_cycle": train(count=22, schedule="cycle"),
        "train_scheduler_alone": train(epochs=1, step_scheduler_with_optimizer=False),
        "metrics_full": metrics(16),
        "metrics_tail_1": metrics(17),
        "metrics_tail_7": metrics(15),
        "metrics_tiny": metrics(1),
        "repeated": [repeated(13), repeated(16), repeated(13, drop_last=True), repeated(3)],
        "tied": tied(os.path.join(folder, "tied")),
        "batches": [batches(count, batch) for count, batch in ((8, 2), (9, 2), (11, 3), (1, 4), (10, 4))],
        "batches_split": batches(10, 4, split_batches=True),
        "batches_dispatch": batches(12, 2, dispatch_batches=True),
        "batches_stream": batches(12, 2, iterable=True),
        "batches_stream_sharded": batches(12, 2, iterable=True, dispatch_batches=False),
        "own_windows": own_windows(),
        "divided_outside": divided_outside(),
        "sync_options": sync_options(),
        "operations": operations(),
        "checkpoints": checkpoints(folder),
    }
