"""Prints a program as the script that a person would write. What runs in the ranks is this text, so it says what ran.

`definitions` and `construction` are the part that plain PyTorch shares; `plain` runs them, too, and reads the body as data.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from loops import zoo
from loops.programs import (
    Accumulate,
    AddGroup,
    Alone,
    Backward,
    Clip,
    Continue,
    CountLocalStep,
    Edit,
    Evaluate,
    EvaluateAverage,
    EvaluateBatch,
    EvaluateKept,
    Forward,
    ForwardBackward,
    Freeze,
    GradientsOf,
    Loader,
    Mode,
    Next,
    Optimizer,
    Prepare,
    Program,
    Rate,
    Read,
    Recall,
    Record,
    Remember,
    SchedulerStep,
    Setting,
    Slice,
    Statement,
    States,
    Step,
    UpdateAverage,
    UpdateBatchNorm,
    When,
    Write,
    Zero,
    models_of,
    statements,
    uses,
)

if TYPE_CHECKING:
    from loops.check import Case
    from loops.compare import Outcome

INDENT = "    "
OPTIMIZERS = {
    "SGD": "torch.optim.SGD({}, lr=0.1)",
    "momentum": "torch.optim.SGD({}, lr=0.05, momentum=0.9)",
    "Adam": "torch.optim.Adam({}, lr=0.02)",
    "AdamW": "torch.optim.AdamW({}, lr=0.02, weight_decay=0.1)",
    "RMSprop": "torch.optim.RMSprop({}, lr=0.01, eps=1e-4)",
    "Adagrad": "torch.optim.Adagrad({}, lr=0.05, eps=1e-6)",
}
# Those of `draw_low`, with states of 8 bits.
LATER_OPTIMIZERS = {"adamw8bit": "adamw8bit({}, lr=0.02)"}
OPTIMIZERS_OF_MODULES = {"Muon": "ExactMuon({}, muon_lr=0.02, adam_lr=0.01)"}
SCHEDULERS = {
    "StepLR": "torch.optim.lr_scheduler.StepLR({}, 2, gamma=0.5)",
    "ExponentialLR": "torch.optim.lr_scheduler.ExponentialLR({}, 0.8)",
    "CosineAnnealingLR": "torch.optim.lr_scheduler.CosineAnnealingLR({}, 5)",
}
# Those of `draw_more`.
LATER_SCHEDULERS = {
    "LambdaLR": "torch.optim.lr_scheduler.LambdaLR({}, lambda epoch: 1 / (1 + epoch))",
    "OneCycleLR": "torch.optim.lr_scheduler.OneCycleLR({}, max_lr=0.05, total_steps=200)",
    "SequentialLR": (
        "torch.optim.lr_scheduler.SequentialLR({0}, [torch.optim.lr_scheduler.ConstantLR({0}, 0.5, 2), "
        "torch.optim.lr_scheduler.ExponentialLR({0}, 0.8)], [2])"
    ),
    "ReduceLROnPlateau": "torch.optim.lr_scheduler.ReduceLROnPlateau({}, patience=0, threshold=0.01)",
}
# More arguments of optimizers, of `draw_more`.
OPTIONS = {
    "SGD": ("foreach=True", "foreach=False", "fused=True", "weight_decay=0.1", "maximize=True"),
    "momentum": ("foreach=True", "fused=True", "nesterov=True", "dampening=0.5", "weight_decay=0.1"),
    "Adam": ("foreach=True", "fused=True", "amsgrad=True", "capturable=True", "differentiable=True"),
    "AdamW": ("foreach=True", "foreach=False", "fused=True", "amsgrad=True", "maximize=True"),
    "RMSprop": ("foreach=True", "centered=True", "momentum=0.5"),
    "Adagrad": ("foreach=True", "fused=True", "lr_decay=0.1", "initial_accumulator_value=0.1"),
}
AVERAGES = {
    "mean": "AveragedModel({})",
    "moving": "AveragedModel({}, multi_avg_fn=get_ema_multi_avg_fn(0.9))",
    "mean with buffers": "AveragedModel({}, use_buffers=True)",
    "moving with buffers": "AveragedModel({}, avg_fn=get_ema_avg_fn(0.9), use_buffers=True)",
}
_STREAM = '''
class Stream(torch.utils.data.IterableDataset):
    """Rows one after the other, from the beginning again if it is endless."""

    def __init__(self, rows, endless=False):
        self.rows, self.endless = rows, endless

    def __iter__(self):
        while True:
            for number in range(len(self.rows)):
                yield self.rows[number]
            if not self.endless:
                return


class SizedStream(Stream):
    def __len__(self):
        return len(self.rows)
'''
_DATA = """
def rows_of(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(count, 4, generator=generator) for _ in range(2))
    return TensorDataset(x, y, torch.randint(1, 6, (count,), generator=generator))


def per_row(output, y):
    return (output - y).square().mean(1)
"""
_DOCUMENTS = '''
class Texts:
    """Documents of 2 to 9 tokens, each with a target and a weight."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(2, 10, (count,), generator=generator).tolist()
        self.ids = [torch.randint(0, 8, (length,), generator=generator) for length in self.lengths]
        self.weights = [torch.randint(1, 6, (length,), generator=generator) for length in self.lengths]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "targets": ids.roll(-1), "weights": self.weights[index]}


def unpacked(batch):
    y = VALUES[batch["targets"][0]]
    return (batch["input_ids"], batch["position_ids"]), y, batch["weights"][0]


VALUES = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
'''
_ELEMENTS = """
def mean_loss(output, y):
    return (output - y).square().mean()


def sum_loss(output, y):
    return (output - y).square().sum()
"""
_FOLLOWING = """
def following(number):
    if number not in iterators:
        iterators[number] = iter(loaders[number])
    # The first iterator of a run that goes on at the end of an epoch is empty.
    batch = next(iterators[number], None)
    if batch is None:
        iterators[number] = iter(loaders[number])
        batch = next(iterators[number])
    return batch
"""
_AHEAD = """
def ahead(loader, number):
    batches = iter(loader)
    taken = list(itertools.islice(batches, number))
    for batch in batches:
        taken.append(batch)
        yield taken.pop(0)
    while taken:
        yield taken.pop(0)
"""
_AGAIN = """
def again(loader, which):
    kept = []
    for batch in loader:
        yield batch
        if which == "another":
            kept.append(batch)
            yield kept[len(kept) // 2]
        else:
            yield from kept
            kept = [batch]
"""
_PENALTY = """
def penalty_of(function, x):
    x = x.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    return slopes.square().mean(1)
"""
_REMEMBERED = """
def remembered(states, file):
    if not file:
        return copy.deepcopy(states)
    buffer = io.BytesIO()
    torch.save(states, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)
"""
_GRADIENT_SIZE = """
def size_of_gradients(model):
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return sum(float(gradient.abs().sum()) for gradient in whole if gradient is not None)
"""
_GRADIENTS_OF = """
def gradients_of(loss, model, **options):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, parameters, materialize_grads=True, **options)


def hessian_product(loss, model, **options):
    first = gradients_of(loss, model, create_graph=True, **options)
    weights = [p.detach() for p in model.parameters() if p.requires_grad]
    product = sum((gradient * weight).sum() for gradient, weight in zip(first, weights))
    return gradients_of(product, model, **options)


def averaged(gradients):
    # Those of divided layers are divided.
    gradients = [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]
    return accelerator.reduce(gradients, "mean")


def size_of_all(gradients):
    return sum(float(gradient.abs().sum()) for gradient in averaged(gradients))
"""
_ALONE = """
def told(value):
    return float(accelerator.reduce(torch.tensor(float(value)), "sum"))


SAMPLE = torch.linspace(-1, 1, 8).reshape(2, 4)
"""
_STATES = """
def size_of_states(optimizer):
    values = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    values = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]
    return sum(float(value.abs().sum()) for value in values if isinstance(value, torch.Tensor) and value.ndim)


def halved(states):
    def half(value):
        return 0.5 * value if isinstance(value, torch.Tensor) and value.ndim else value

    return {number: {name: half(value) for name, value in state.items()} for number, state in states.items()}
"""
_HEAD_HOOKS = {
    "input": "head.register_forward_pre_hook(lambda _, inputs: (1.25 * inputs[0],))",
    "output": "head.register_forward_hook(lambda _, inputs, output: 0.75 * output)",
    "input gradient": "head.register_full_backward_hook(lambda _, i, o: tuple(g if g is None else 0.5 * g for g in i))",
    "output gradient": "head.register_full_backward_pre_hook(lambda _, outputs: tuple(0.5 * g for g in outputs))",
}
_HOOKS = {
    "double": ("parameter.register_hook(lambda gradient: 2 * gradient)",),
    "clamp": ("parameter.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-0.01, 0.01))",),
    "fused": ("parameter.register_post_accumulate_grad_hook(step_at_once)",),
}
_MUON = '''
class ExactMuon(Muon):
    """Muon whose iteration does not enlarge a rounding to bf16."""

    def orthogonal(self, matrix, group):
        if matrix.dim() == 3:
            return super().orthogonal(matrix, group)
        flat = matrix.flatten(1)
        return newton_schulz(flat).mul(shape_scale(flat)).reshape(matrix.shape)
'''
_FUSED = """
@torch.no_grad()
def step_at_once(parameter):
    parameter -= 0.1 * parameter.grad
    parameter.grad = None
"""


def definitions(program: Program) -> str:
    """Imports, classes and functions."""
    kinds = {loader.kind for loader in program.loaders}
    bodies = dict.fromkeys(model.body for model in program.models if model.body_of is None)
    text = ["import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n"]
    if program.precision == "no":
        text.append("torch.set_default_dtype(torch.float64)\n")
    parts = [zoo.Block] * ("Blocks" in bodies) + [zoo.TwoExperts] * ("StackedMixture" in bodies)
    parts += [zoo.WideBlock] * ("Wide" in bodies)
    nets = [zoo.Net, *([zoo.PackedNet] * ("Documents" in bodies))]
    classes = [*parts, *((zoo.BODIES | zoo.LATER_BODIES)[body] for body in bodies), *nets]
    text += ["\n" + _source(cls) for cls in classes]
    if kinds - {"map", "packed"}:
        text.append(_STREAM)
    if "packed" in kinds:
        text.insert(1, "from paceline import PackedDocuments, TokenBatchSampler, pack_documents\n")
        text.append(_DOCUMENTS)
    if _has_eight_bits(program):
        # torchao compiles its step for each shape, which takes seconds.
        text.insert(1, "from paceline.optim import adamw8bit\n")
        text.append('\ntorch.compiler.set_stance("force_eager")')
    text.append(_DATA)
    if uses(program, ForwardBackward):
        text.append(_ELEMENTS)
    if any(hook.kind == "fused" for hook in program.hooks):
        text.append(_FUSED)
    if program.averages:
        names = "AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn"
        text.insert(1, f"from torch.optim.swa_utils import {names}\n")
    if any(isinstance(each, Forward) and each.penalty for each in statements(program.body)):
        text.append(_PENALTY)
    if uses(program, Remember):
        text.insert(1, "import copy\nimport io\n")
        text.append(_REMEMBERED)
    if uses(program, Alone):
        text.insert(1, "import io\n")
    if any(optimizer.kind in OPTIMIZERS_OF_MODULES for optimizer in program.optimizers):
        text.insert(1, "from paceline_large.optim.muon import Muon, newton_schulz, shape_scale\n")
        text.append(_MUON)
    return "\n".join(text)


def _has_eight_bits(program: Program) -> bool:
    return any(optimizer.kind in LATER_OPTIMIZERS for optimizer in program.optimizers)


_source = cache(inspect.getsource)  # half of the time of a program on one process


def construction(program: Program, batches: Mapping[int, str] | None = None) -> str:
    """Models, optimizers, schedulers and loaders, before they are prepared.

    Args:
        batches: the text of a loader's batch size, where it is not the program's number.
    """
    lines = [f"torch.manual_seed({program.seed})"]
    for number, model in enumerate(program.models):
        tied = "tied=True" if model.tied else ""
        body = f"model{model.body_of}.body" if model.body_of is not None else f"{model.body}({tied})"
        side = ", side=True" if model.side else ""
        net = "PackedNet" if model.body == "Documents" else "Net"
        lines.append(f"model{number} = {net}({body}{side})")
        if model.frozen:
            lines.append(f"model{number}.{model.frozen}.requires_grad_(False)")
    lines += [_made(number, optimizer) for number, optimizer in enumerate(program.optimizers)]
    if program.loose:
        lines.append("scale = nn.Parameter(torch.tensor(0.9))")
        lines.append('optimizer0.add_param_group({"params": [scale]})')
    if program.begun:
        lines += _begun(program)
    for number, scheduler in enumerate(program.schedulers):
        made = (SCHEDULERS | LATER_SCHEDULERS)[scheduler.kind].format(f"optimizer{scheduler.optimizer}")
        lines.append(f"scheduler{number} = {made}")
    for number, average in enumerate(program.averages):
        lines.append(f"average{number} = {AVERAGES[average.kind].format(f'model{average.model}')}")
    for number, loader in enumerate(program.loaders):
        if loader.kind == "packed":
            lines += _packed(number, loader, program.seed + number)
            continue
        data = f"rows_of({loader.rows}, {program.seed + number})"
        if loader.kind != "map":
            cls = "SizedStream" if loader.kind == "sized" else "Stream"
            data = f"{cls}({data}{', endless=True' * (loader.kind == 'endless')})"
        size = (batches or {}).get(number, str(loader.batch))
        options = ", shuffle=True" * loader.shuffle + ", drop_last=True" * loader.drop_last
        lines.append(f"loader{number} = DataLoader({data}, batch_size={size}{options})")
    if _has_eight_bits(program):
        # The table of codes has the default dtype, and torchao multiplies it by float32.
        lines.append("torch.set_default_dtype(torch.float32)")
    return "\n".join(lines) + "\n"


def _packed(number: int, loader: Loader, seed: int) -> list[str]:
    """The lines that make a loader of packed documents."""
    sampler = f"TokenBatchSampler(texts{number}, tokens={loader.batch})"
    return [
        f"texts{number} = Texts({loader.rows}, {seed})",
        f"loader{number} = DataLoader(texts{number}, batch_sampler={sampler}, collate_fn=pack_documents)",
    ]


def _made(number: int, optimizer: Optimizer) -> str:
    """The line that makes an optimizer."""
    if optimizer.kind in OPTIMIZERS_OF_MODULES:
        return f"optimizer{number} = {OPTIMIZERS_OF_MODULES[optimizer.kind].format(_modules(optimizer))}"
    made = (OPTIMIZERS | LATER_OPTIMIZERS)[optimizer.kind].format(_groups(optimizer))
    options = f", {optimizer.options}" * bool(optimizer.options)
    return f"optimizer{number} = {made[:-1]}{options})"


def replacing(program: Program) -> list[str]:
    """The lines that make the optimizers of `Program.afterwards`."""
    kinds = zip(program.optimizers, program.afterwards, strict=True)
    return [_made(number, replace(optimizer, kind=kind, options="")) for number, (optimizer, kind) in enumerate(kinds)]


def _begun(program: Program) -> list[str]:
    """The steps before models and optimizers are prepared."""
    lines = [f"x, y, _ = rows_of(5, {program.seed}).tensors", f"for _ in range({program.begun}):"]
    models = range(len(program.models))
    steps = [f"per_row(model{number}(x), y).mean().backward()" for number in models]
    steps += [f"optimizer{number}.step()" for number in range(len(program.optimizers))]
    steps += [f"model{number}.zero_grad()" for number in models]
    return lines + [INDENT + step for step in steps]


def script(
    program: Program, plan: Mapping[str, int | str], phase: str = "", folder: str = "saved", epoch: int = 0
) -> str:
    """The script under a plan.

    Args:
        phase: "" for a whole run, "save" for one that ends at `save_at`, "resume" for the rest of it.
        folder: of the checkpoint.
        epoch: in which it was saved.
    """
    options = ["cpu=True"]
    if program.precision != "no":
        options.append(f"mixed_precision={program.precision!r}")
    if program.precision == "fp16":
        # With the default, the first steps may overflow, and whether they do depends on the rows of a rank.
        options.append("scaler={'init_scale': 256.0}")
    if program.window > 1:
        options.append(f"gradient_accumulation_steps={program.window}")
    options.append(f"split_batches={program.split_batches}")
    if program.dispatch is not None:
        options.append(f"dispatch_batches={program.dispatch}")
    settings: dict[str, int | str] = {**plan}
    of_strategies: dict[str, dict[str, object]] = {}
    if program.offload:
        settings["offload"] = program.offload
        of_strategies["offload"] = {"always": True}
    if program.offload.endswith("=disk"):
        settings["offload"] = f"{program.offload}:{tempfile.gettempdir()}"
        of_strategies["offload"]["part_mb"] = 0.0003  # about two matrices of most models
    if program.recipe:
        of_strategies["fp8"] = {"recipe": program.recipe}
    if program.recompute:
        settings["recompute"] = program.recompute
    if "schedule" in settings:
        of_strategies["pipeline"] = {"schedule": settings.pop("schedule")}
    if of_strategies:
        options.append(f"options={of_strategies}")
    if settings:
        options.append(f"plan={settings}")
    batches = {}
    if not program.split_batches:
        width = "accelerator.plan.layout.width"
        batches = {number: f"{loader.batch} // {width}" for number, loader in enumerate(program.loaders)}
    parts = [part for part in _parts(program) if not _is_late(program, *part)]
    first = [f"{kind}{number}" for kind, number in parts if not _is_apart(program, kind, number)]
    second = [f"{kind}{number}" for kind, number in parts if _is_apart(program, kind, number)]
    first += ["scale"] * program.loose
    imported = "Accelerator, LocalSGD" if program.local else "Accelerator"
    text = [
        definitions(program).replace("\nfrom torch.utils", f"\nfrom paceline import {imported}\nfrom torch.utils", 1),
        following(program),
        "" if not uses(program, Read) else _GRADIENT_SIZE + "\n",
        "" if not uses(program, GradientsOf) else _GRADIENTS_OF + "\n",
        "" if not uses(program, Alone) else _ALONE + "\n",
        "" if not uses(program, States) else _STATES + "\n",
        f"accelerator = Accelerator({', '.join(options)})\n",
        f"accelerator2 = Accelerator({', '.join(options)})\n" * program.apart,
    ]
    run = [
        construction(program, batches),
        _loading(program, folder) if program.plain_save and phase == "resume" else "",
        _compiled(program, ("before", "in place")),
        _prepared("accelerator", first),
        _prepared("accelerator2", second) if second else "",
        _compiled(program, ("after",)),
        *_around_the_loop(program),
    ]
    text += run
    text.append("losses, norms, metrics, gradients = [], [], [], []\n\n\n")
    text.append("\n".join(_loop(program, phase == "save", folder)) + "\n\n\n")
    arguments = ""
    if phase == "resume":
        first_epoch = epoch + 1 if program.plain_save else epoch
        arguments = f"first_epoch={first_epoch}, t={program.save_at}"
    if phase == "resume" and not program.plain_save:
        text.append(f'accelerator.load_state("{folder}")\n')
    text.append(f"with local:\n{INDENT}train({arguments})\n" if program.local else f"train({arguments})\n")
    if program.twice:
        again = construction(replace(program, seed=program.seed + 1), batches)
        text += ["\n\naccelerator.clear()\n", again, *run[1:], "train()\n"]
    return "".join(text)


def _around_the_loop(program: Program) -> list[str]:
    """What stands between `prepare` and the loop: hooks, iterators, parameters that are taken early, local steps."""
    text = []
    for hook in program.hooks:
        text.append(f"head = accelerator.unwrap_model(model{hook.model}).head\n")
        if hook.kind in _HEAD_HOOKS:
            text.append(f"{_HEAD_HOOKS[hook.kind]}\n")
            continue
        text.append("for parameter in head.parameters():\n")
        text += [f"{INDENT}{line}\n" for line in _HOOKS[hook.kind]]
    if _takes_next(program):
        loaders = ", ".join(f"loader{number}" for number in range(len(program.loaders)))
        cycles = [number for number, loader in enumerate(program.loaders) if loader.taken == "cycle"]
        iterators = ", ".join(f"{number}: itertools.cycle(loader{number})" for number in cycles)
        text.append(f"iterators, loaders = {{{iterators}}}, [{loaders}]\n")
    for write in _early_writes(program):
        given = written(replace(write, early=False))
        text.append(f"{written(write)} = list({given})\n")
    if program.local:
        outer = ", outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9)" * program.local.outer
        text.append(f"local = LocalSGD(accelerator, model0, local_sgd_steps={program.local.steps}{outer})\n")
    return text


def _compiled(program: Program, places: tuple[str, ...]) -> str:
    """The lines that compile the models at one of these places."""
    if program.compiled is None or program.compiled.place not in places:
        return ""
    made = "model{0} = torch.compile(model{0}, backend={1!r})\n"
    if program.compiled.place == "in place":
        made = "model{0}.compile(backend={1!r})\n"
    return "".join(made.format(number, program.compiled.backend) for number in range(len(program.models)))


def _prepared(accelerator: str, names: list[str]) -> str:
    return f"{', '.join(names)} = {accelerator}.prepare({', '.join(names)})\n"


def _is_of_second(program: Program, statement: Statement) -> bool:
    """Whether a statement is one of the second accelerator's; evaluation is that of its loader's."""
    if isinstance(statement, Evaluate | EvaluateAverage | EvaluateBatch):
        return _is_apart(program, "loader", statement.loader)
    models = models_of(program, statement)
    return program.apart and bool(models) and 0 not in models


def _stateful(program: Program) -> list[str]:
    """The names of what a plain checkpoint holds."""
    return [f"{kind}{number}" for kind, number in _parts(program) if kind != "loader"]


def _loading(program: Program, folder: str) -> str:
    lines = [f'states = torch.load("{folder}.pt", weights_only=False)']
    lines += [f'{name}.load_state_dict(states["{name}"])' for name in _stateful(program)]
    return "\n".join(lines) + "\n"


def _plain_save(program: Program, folder: str) -> str:
    states = []
    for name in _stateful(program):
        model = name.startswith(("model", "average"))
        state = f"accelerator.get_state_dict({name})" if model else f"{name}.state_dict()"
        states.append(f'"{name}": {state}')
    return f'accelerator.save({{{", ".join(states)}}}, "{folder}.pt")'


def _is_late(program: Program, kind: str, number: int) -> bool:
    """Whether a part is prepared by a statement of the loop."""
    if program.late is None or kind == "loader":
        return False
    return _models_of_part(program, kind, number) == {program.late}


def _is_apart(program: Program, kind: str, number: int) -> bool:
    """Whether a part is prepared by the second accelerator: what belongs to other models than the first one alone."""
    models = _models_of_part(program, kind, number)
    return program.apart and bool(models) and 0 not in models


def _models_of_part(program: Program, kind: str, number: int) -> set[int]:
    if kind == "model":
        return {number}
    if kind == "average":
        return {program.averages[number].model}
    if kind == "optimizer":
        return models_of(program, Step(number))
    if kind == "scheduler":
        return models_of(program, SchedulerStep(number))
    users = [each for each in statements(program.body) if isinstance(each, Forward) and each.loader == number]
    return set().union(*(models_of(program, each) for each in users))


def standalone(case: Case, result: Outcome) -> str:
    """The script of a case that did not end equal, for a person to run; the first line says what is wrong."""
    program = case.program
    summary = " ".join(result.detail.split())[:400] or "equal"
    first = f'"""{result.kind}: {result.what}. {summary}\n\n'
    if program.save_at is not None:
        world, plan = case.then
        first += f"Saved on {case.world} processes under {case.plan}, it goes on on {world} under {plan}.\n"
    command = f"paceline launch --cpu --procs {case.world} {case.name}.py"
    from loops.check import DOORS

    own = DOORS[case.door].script(program, case.settings)
    text = first.replace("\\", "/") + f'Run: {command}\n"""\n\n' + own
    shown = ", ".join(f"{name}={{{name}}}" for name in ("losses", "norms", "metrics", "gradients"))
    if case.door != "deepspeed":
        text += f"weights = [accelerator.get_state_dict(model) for model in ({_names(program, 'model')},)]\n"
    text += "sizes = [round(float(value.abs().sum()), 8) for each in weights for value in each.values()]\n"
    printing = "print" if case.door == "deepspeed" else "accelerator.print"
    return text + f'{printing}(f"{shown} {{sizes=}}")\n'


def _names(program: Program, kind: str) -> str:
    return ", ".join(f"{each}{number}" for each, number in _parts(program) if each == kind)


def _parts(program: Program) -> list[tuple[str, int]]:
    kinds = {"model": program.models, "optimizer": program.optimizers, "scheduler": program.schedulers}
    kinds["loader"] = program.loaders  # type: ignore[assignment]
    averages = [("average", number) for number, each in enumerate(program.averages) if each.prepared]
    return [*averages, *((kind, number) for kind, parts in kinds.items() for number in range(len(parts)))]


def _early_writes(program: Program) -> list[Write]:
    """Those of parameters that are taken before the loop, one for each model and part."""
    writes = [each for each in statements(program.body) if isinstance(each, Write) and each.early]
    return list({written(write): write for write in writes}.values())


def following(program: Program) -> str:
    """The functions by which a program takes the next batch, batches ahead, or kept ones; "" if it has no need of them."""
    text = _FOLLOWING + "\n" if _takes_next(program) else ""
    if program.loop.ahead or any(loader.taken == "cycle" for loader in program.loaders):
        text += "\nimport itertools\n\n"
    text += _AHEAD + "\n" if program.loop.ahead else ""
    return text + (_AGAIN + "\n" if program.loop.again else "")


def plain_statement(program: Program, statement: Statement) -> list[str]:
    """The lines of a statement outside of `accumulate`; see `_statement`."""
    return _statement(program, statement, inside=False)


def _takes_next(program: Program) -> bool:
    return program.loop.kind == "next" or uses(program, Next)


def _groups(optimizer: Optimizer) -> str:
    groups = [_parameters(each) for each in optimizer.slices]
    if len(groups) == 1:
        return groups[0]
    return "[" + ", ".join(f'{{"params": {group}}}' for group in groups) + "]"


def _modules(optimizer: Optimizer) -> str:
    modules = [f"model{each.model}" + ("" if each.part == "all" else f".{each.part}") for each in optimizer.slices]
    return modules[0] if len(modules) == 1 else f"nn.ModuleList([{', '.join(modules)}])"


def _parameters(each: Slice, model: str = "model{}") -> str:
    part = "" if each.part == "all" else f".{each.part}"
    return f"{model.format(each.model)}{part}.parameters()"


def _loop(program: Program, saves: bool, folder: str) -> list[str]:
    loop = program.loop
    lines = ["def train(first_epoch=0, t=-1):"]
    assigned = _assigned_in_loop(program)
    if assigned:
        lines.append(f"{INDENT}global {', '.join(assigned)}")
    batches = [f"x{number}, y{number}, w{number}" for number in loop.loaders]
    if loop.kind == "next":
        lines.append(f"{INDENT}while t < {loop.steps - 1}:")
        depth = 2
    else:
        lines.append(f"{INDENT}for epoch in range(first_epoch, {loop.epochs}):")
        if program.afterwards:
            names = ", ".join(f"{kind}{number}" for kind, number in _parts(program))
            lines.append(f"{INDENT * 2}if epoch == 1:")
            models = [f"model{number}" for number in range(len(program.models))]
            again = [f"{model} = accelerator.unwrap_model({model})" for model in models]
            again += ["accelerator.clear()", *replacing(program), f"{names} = accelerator.prepare({names})"]
            lines += [INDENT * 3 + line for line in again]
        if loop.kind == "zip":
            names = ", ".join(f"loader{number}" for number in loop.loaders)
            lines.append(f"{INDENT * 2}for ({'), ('.join(batches)}) in zip({names}):")
        else:
            taken = _unpacked(program, loop.loaders[0])
            if loop.ahead:
                taken = f"ahead({taken}, {loop.ahead})"
            if loop.again:
                taken = f'again({taken}, "{loop.again}")'
            lines.append(f"{INDENT * 2}for {batches[0]} in {taken}:")
        depth = 3
    if saves:
        lines += [
            f"{INDENT * depth}if t == {program.save_at}:",
            f"{INDENT * (depth + 1)}raise AssertionError('not saved')",
        ]
    lines.append(f"{INDENT * depth}t += 1")
    for line in _body(program, program.body, inside=False):
        lines.append(INDENT * depth + line)
    if saves:
        lines.append(f"{INDENT * depth}if t == {program.save_at}:")
        save = _plain_save(program, folder) if program.plain_save else f'accelerator.save_state("{folder}")'
        lines += [f"{INDENT * (depth + 1)}{save}", f"{INDENT * (depth + 1)}return"]
    return lines


def _assigned_in_loop(program: Program) -> list[str]:
    """The names outside of the loop's function that it assigns."""
    names = []
    if program.afterwards:
        names += [f"{kind}{number}" for kind, number in _parts(program)]
    if program.late is not None:
        names += [f"{kind}{number}" for kind, number in _parts(program) if _is_late(program, kind, number)]
    if uses(program, Remember):
        names.append("states")
    return names


def _body(program: Program, body: Iterable[Statement], inside: bool) -> list[str]:
    lines = []
    for statement in body:
        own = _statement(program, statement, inside)
        if _is_of_second(program, statement):
            own = [line.replace("accelerator.", "accelerator2.") for line in own]
        lines += own
    return lines or ["pass"]


def _statement(program: Program, statement: Statement, inside: bool) -> list[str]:
    """The lines of one statement; `inside` of `accumulate` or not."""
    match statement:
        case Forward(name, model, loader, through, detach, penalty):
            given = f"x{loader}"
            if through is not None:
                given = _call(program, through, given) + ".detach()" * detach
            scaled = "scale * " * program.loose
            if penalty:
                return [f"rows{name} = {scaled}penalty_of(lambda x: {_call(program, model, 'x')}, {given})"]
            return [f"rows{name} = {scaled}per_row({_call(program, model, given)}, y{loader})"]
        case Backward(names, items, only):
            loss, options = _loss_of(program, names, items)
            if only is not None:
                options += f", inputs={_clipped(program, 'optimizer', only)}"
            return [f"accelerator.backward({loss}{options})"]
        case ForwardBackward(model, loader, items):
            loss, count = ("sum_loss", f", num_items=y{loader}.numel()") if items else ("mean_loss", "")
            return [f"accelerator.forward_backward(model{model}, (x{loader}, y{loader}), {loss}{count})"]
        case Record(name):
            return [f"losses.append(float(accelerator.gather_for_metrics(rows{name}.detach()).mean()))"]
        case Clip(over, number, limit, by):
            parameters = _clipped(program, over, number)
            if by == "value":
                return [f"accelerator.clip_grad_value_({parameters}, {limit})"]
            noted = "norms.append(float(norm))"
            if program.local:
                # Each rank has a norm of its own.
                return [f"accelerator.clip_grad_norm_({parameters}, {limit})"]
            if inside and program.window > 1:
                noted = f"if accelerator.sync_gradients:\n{noted}"
            return [f"norm = accelerator.clip_grad_norm_({parameters}, {limit})", *_indented(noted)]
        case Read(model):
            return ["accelerator.unscale_gradients()", f"gradients.append(size_of_gradients(model{model}))"]
        case Edit(kind, model, part):
            given = written(Write("multiply", model, part))
            changed = (EDITS | LATER_EDITS)[kind]
            edit = [f"for p in {given}:", f"{INDENT}if p.grad is not None:", INDENT * 2 + changed]
            return ["accelerator.unscale_gradients()", *edit]
        case Rate(optimizer, factor):
            return [f"for group in optimizer{optimizer}.param_groups:", f'{INDENT}group["lr"] *= {factor}']
        case Remember(file):
            models = [f"accelerator.get_state_dict(model{number})" for number in range(len(program.models))]
            optimizers = [f"optimizer{number}.state_dict()" for number in range(len(program.optimizers))]
            return [f"states = remembered([{', '.join(models + optimizers)}], file={file})"]
        case Recall():
            names = [f"model{number}" for number in range(len(program.models))]
            names += [f"optimizer{number}" for number in range(len(program.optimizers))]
            loop = f"for each, state in zip([{', '.join(names)}], states):"
            return [loop, f"{INDENT}each.load_state_dict(copy.deepcopy(state))"]
        case UpdateAverage(average):
            return [f"average{average}.update_parameters(model{program.averages[average].model})"]
        case UpdateBatchNorm(average, loader):
            return [f"update_bn(loader{loader}, average{average})"]
        case Prepare(model):
            parts = [part for part in _parts(program) if _is_late(program, *part)]
            names = ", ".join(f"{kind}{number}" for kind, number in parts)
            return [f"{names} = accelerator.prepare({names})"]
        case Step(optimizer):
            return [f"optimizer{optimizer}.step()"]
        case SchedulerStep(scheduler) if program.schedulers[scheduler].kind == "ReduceLROnPlateau":
            return [f"scheduler{scheduler}.step(norms[-1] if norms else 1.0)"]
        case SchedulerStep(scheduler):
            return [f"scheduler{scheduler}.step()"]
        case Zero("hand", model):
            return [f"for parameter in model{model}.parameters():", f"{INDENT}parameter.grad = None"]
        case Zero(how, number, to_none):
            return [f"{how}{number}.zero_grad({'' if to_none else 'set_to_none=False'})"]
        case Freeze(model, part, frozen):
            module = "" if part == "all" else f".{part}"
            return [f"accelerator.unwrap_model(model{model}){module}.requires_grad_({not frozen})"]
        case AddGroup(optimizer, each):
            parameters = _parameters(each, "accelerator.unwrap_model(model{})")
            return [f'optimizer{optimizer}.add_param_group({{"params": {parameters}}})']
        case Write():
            return _write(statement)
        case Next(loader):
            taken = f"following({loader})"
            if program.loaders[loader].taken == "fresh":
                taken = f"next(iter(loader{loader}))"
            return [f"x{loader}, y{loader}, w{loader} = {taken}"]
        case Evaluate(number, loader) | EvaluateAverage(number, loader):
            model = f"average{number}" if isinstance(statement, EvaluateAverage) else f"model{number}"
            star = "*" * (program.loaders[loader].kind == "packed")
            return _evaluation(
                model,
                "seen = []",
                f"for x, y, w in {_unpacked(program, loader)}:",
                f"{INDENT}seen.append(accelerator.gather_for_metrics(per_row({model}({star}x), y)))",
                "metrics.append(float(torch.cat(seen).mean()))",
            )
        case EvaluateBatch(model, loader):
            seen = f"accelerator.gather_for_metrics(per_row(model{model}(x{loader}), y{loader}))"
            return _evaluation(f"model{model}", f"metrics.append(float({seen}.mean()))")
        case EvaluateKept():
            return _evaluation_of_kept(program, statement)
        case GradientsOf():
            return _gradients_of(program, statement)
        case Alone(kind, model):
            return _alone(program, kind, model)
        case Setting(optimizer, name, value):
            return [f"for group in optimizer{optimizer}.param_groups:", f'{INDENT}group["{name}"] = {value}']
        case States(kind, optimizer):
            return _states(program, kind, optimizer)
        case Mode(model, part, training):
            module = f"model{model}" if part == "all" else f"accelerator.unwrap_model(model{model}).{part}"
            return [f"{module}.{'train' if training else 'eval'}()"]
        case CountLocalStep():
            return ["local.step()"]
        case Continue():
            return ["continue"]
        case When(kind, number, rest, body):
            conditions = {
                "every": f"t % {number:g} == {rest}",
                "at": f"t == {number:g}",
                "from": f"t >= {number:g}",
                "sync": "accelerator.sync_gradients",
                "large": f"norm > {number}",
            }
            return [f"if {conditions[kind]}:", *(INDENT + line for line in _body(program, body, inside))]
        case Accumulate(models, body):
            names = ", ".join(f"model{model}" for model in models)
            lines = _body(program, body, inside=True)
            return [f"with accelerator.accumulate({names}):", *(INDENT + line for line in lines)]
    raise AssertionError(statement)


_WRITES = {
    "multiply": "p.mul_(0.9)",
    "data": "p.data.mul_(0.9)",
    "copy": "p.data.copy_(0.5 * p.data)",
    "clamp": "p.data.clamp_(-0.3, 0.3)",
    "assign": "p.data = 0.9 * p.data",
    "constant": "nn.init.constant_(p, 0.1)",
    "clip": "p.clamp_(-0.3, 0.3)",
}
EDITS = {
    "scale": "p.grad.mul_(0.5)",
    "decay": "p.grad.add_(p.detach(), alpha=0.01)",
    "assign": "p.grad = 0.5 * p.grad",
    "centre": "p.grad -= p.grad.mean()",
}
LATER_EDITS = {"normalise": "p.grad /= 0.01 + p.grad.norm()"}


def _loss_of(program: Program, names: Iterable[int], items: str | None) -> tuple[str, str]:
    """What `backward` gets: the loss, and the number of its items."""
    if items is None:
        return " + ".join(f"rows{name}.mean()" for name in names), ""
    weight = f"w{_loader_of(program, next(iter(names)))}"
    if items == "mask":
        mask = f"{weight} > 3"
        return " + ".join(f"rows{name}[{mask}].sum()" for name in names), f", num_items=({mask}).sum()"
    if items == "float":
        weight = f"({weight} * 0.3)"
    loss = " + ".join(f"(rows{name} * {weight}).sum()" for name in names)
    return loss, f", num_items={items}({weight}.sum())"


def _evaluation_of_kept(program: Program, statement: EvaluateKept) -> list[str]:
    write = Write("keep", statement.model, statement.part)
    kept = f"kept{statement.model}_{statement.part}"
    pairs = f"for slow, p in zip({kept}, {written(write)}):"
    evaluation = _statement(program, Evaluate(statement.model, statement.loader), inside=False)
    if statement.by == "data":
        exchange = [pairs, f"{INDENT}p.data, slow.data = slow.data, p.data"]
        return [*exchange, *evaluation, *exchange]
    own = [f"own = [p.detach().clone() for p in {written(write)}]"]
    swap_in = _without_gradients(pairs, "p.copy_(slow)")
    swap_out = _without_gradients(f"for value, p in zip(own, {written(write)}):", "p.copy_(value)")
    return [*own, *swap_in, *evaluation, *swap_out]


def _gradients_of(program: Program, statement: GradientsOf) -> list[str]:
    model, loader = f"model{statement.model}", statement.loader
    star = "*" * (program.loaders[loader].kind == "packed")
    loss = f"per_row({_call(program, statement.model, f'{star}x{loader}')}, y{loader}).mean()"
    options = ""
    if statement.name is not None:
        loss, options = f"rows{statement.name}.mean()", ", retain_graph=True"
    match statement.kind:
        case "log":
            return [f"gradients.append(size_of_all(gradients_of({loss}, {model}{options})))"]
        case "weigh":
            weighed = f"rows{statement.name}"
            return [f"{weighed} = {weighed} / (1 + size_of_all(gradients_of({loss}, {model}{options})))"]
        case "hessian":
            return [f"gradients.append(size_of_all(hessian_product({loss}, {model}{options})))"]
        case "descend":
            trained = f"[p for p in {model}.parameters() if p.requires_grad]"
            step = _without_gradients(f"for p, gradient in zip({trained}, inner):", "p.sub_(gradient, alpha=0.05)")
            return [f"inner = averaged(gradients_of({loss}, {model}{options}))", *step]


def _alone(program: Program, kind: str, model: int) -> list[str]:
    main = "if accelerator.is_main_process:"
    note = "metrics.append(told(alone))"
    if kind == "save":
        saved = ["buffer = io.BytesIO()", "torch.save(state, buffer)", "buffer.seek(0)"]
        saved.append("alone = sum(float(value.double().abs().sum()) for value in torch.load(buffer).values())")
        read = f"state = accelerator.get_state_dict(model{model})"
        return [read, "alone = 0.0", main, *(INDENT + line for line in saved), note]
    if kind == "print":
        read = f"alone = sum(float(p.detach().norm()) for p in model{model}.parameters())"
        return [read, main, f'{INDENT}print(f"weights {{alone:.3f}}", file=io.StringIO())', "metrics.append(alone)"]
    mode = [f"mode = model{model}.training", f"model{model}.eval()"]
    if kind == "evaluate":
        work = ["with torch.no_grad():", f"{INDENT}alone = {_call(program, model, 'SAMPLE')}.square().mean()"]
    else:
        work = ["sample = SAMPLE.clone().requires_grad_()"]
        work.append(f"alone = torch.autograd.grad({_call(program, model, 'sample')}.sum(), sample)[0].abs().sum()")
    work = [*mode, *work, f"model{model}.train(mode)"]
    return ["alone = 0.0", main, *(INDENT + line for line in work), note]


def _states(program: Program, kind: str, optimizer: int) -> list[str]:
    match kind:
        case "read":
            return [f"gradients.append(size_of_states(optimizer{optimizer}))"]
        case "clear":
            return [f"optimizer{optimizer}.state.clear()"]
        case "zero":
            is_one = f"{INDENT * 2}if isinstance(value, torch.Tensor) and value.ndim:"
            loops = [f"for state in optimizer{optimizer}.state.values():", f"{INDENT}for value in state.values():"]
            return [*loops, is_one, f"{INDENT * 3}value.zero_()"]
        case "pop":
            first = program.optimizers[optimizer].slices[0]
            taken = written(Write("keep", first.model, first.part))
            return [f"for p in {taken}:", f"{INDENT}optimizer{optimizer}.state.pop(p, None)"]
    given = f"optimizer{optimizer}.state_dict()"
    return [f"state = {given}", f'optimizer{optimizer}.load_state_dict({{**state, "state": halved(state["state"])}})']


def _write(write: Write) -> list[str]:
    """The lines that write weights."""
    parameters = written(write)
    kept = f"kept{write.model}_{write.part}"
    pairs = f"for slow, p in zip({kept}, {parameters}):"
    match write.kind:
        case "draw":
            return [
                "torch.manual_seed(3)",
                f"with accelerator.full_parameters(model{write.model}, writeback=True):",
                f"{INDENT}for p in {_parameters(Slice(write.model, write.part), 'accelerator.unwrap_model(model{})')}:",
                f"{INDENT * 2}nn.init.normal_(p, std=0.3)",
            ]
        case "load":
            values = '{"weight": torch.full((4, 4), 0.1), "bias": torch.zeros(4)}'
            return [f"accelerator.unwrap_model(model{write.model}).head.load_state_dict({values})"]
        case "load all":
            scaled = "0.9 * value if value.is_floating_point() else value"
            return [
                f"state = accelerator.get_state_dict(model{write.model})",
                f"model{write.model}.load_state_dict({{name: {scaled} for name, value in state.items()}})",
            ]
        case "from":
            given = written(replace(write, model=write.source or 0, early=False))
            return _without_gradients(f"for p, other in zip({parameters}, {given}):", "p.lerp_(other, 0.3)")
        case "descend":
            lines = _without_gradients(
                f"for p in {parameters}:", "if p.grad is not None:", INDENT + "p.add_(p.grad, alpha=-0.05)"
            )
            return ["accelerator.unscale_gradients()", *lines]
        case "keep":
            return [f"{kept} = [p.detach().clone() for p in {parameters}]"]
        case "average":
            return _without_gradients(pairs, "slow.lerp_(p, 0.2)")
        case "blend":
            return _without_gradients(pairs, "p.lerp_(slow, 0.5)")
        case "multiply" | "clip":
            return _without_gradients(f"for p in {parameters}:", _WRITES[write.kind])
    return [f"for p in {parameters}:", INDENT + _WRITES[write.kind]]


def _without_gradients(loop: str, *body: str) -> list[str]:
    return ["with torch.no_grad():", INDENT + loop, *(INDENT * 2 + line for line in body)]


def written(write: Write) -> str:
    """The parameters that are written, as text: those that were taken before the loop, or those of now."""
    if write.early:
        return f"parameters{write.model}_{write.part}"
    if write.part == "all":
        return f"model{write.model}.parameters()"
    return _parameters(Slice(write.model, write.part), "accelerator.unwrap_model(model{})")


def _indented(text: str) -> list[str]:
    first, *others = text.split("\n")
    return [first, *(INDENT + line for line in others)]


def _evaluation(model: str, *lines: str) -> list[str]:
    return [f"{model}.eval()", "with torch.no_grad():", *(INDENT + line for line in lines), f"{model}.train()"]


def _call(program: Program, model: int, given: str) -> str:
    odd = ", t % 2 == 1" * (program.models[model].side == "branch")
    star = "*" * (program.models[model].body == "Documents")
    return f"model{model}({star}{given}{odd})"


def _unpacked(program: Program, loader: int) -> str:
    """What a loop over a loader takes its batches from."""
    is_packed = program.loaders[loader].kind == "packed"
    return f"map(unpacked, loader{loader})" if is_packed else f"loader{loader}"


def _clipped(program: Program, over: str, number: int) -> str:
    if over == "model":
        return f"model{number}.parameters()"
    if over == "all":
        return "[" + ", ".join(f"*model{number}.parameters()" for number in range(len(program.models))) + "]"
    return f'[p for group in optimizer{number}.param_groups for p in group["params"]]'


def _loader_of(program: Program, name: int) -> int:
    for statement in statements(program.body):
        if isinstance(statement, Forward) and statement.name == name:
            return statement.loader
    raise AssertionError(f"no loss {name}")
