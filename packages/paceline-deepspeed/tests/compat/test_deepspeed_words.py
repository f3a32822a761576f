"""Errors and warnings that a script for DeepSpeed meets name calls and settings that it has."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
import paceline_deepspeed
import paceline_large
from paceline.base import wording
from paceline.base.errors import PacelineError
from paceline.testing import run_ranks
from paceline_deepspeed.initialize import initialize
from paceline_deepspeed.phrases import PHRASES

CORE = Path(paceline.__file__).parent
LARGE = Path(paceline_large.__file__).parent
ENGINE = Path(paceline_deepspeed.__file__).parent
# Names of Paceline's own that no script for DeepSpeed has.
NATIVE = re.compile(
    r"accelerator\.|Accelerator\(|`prepare\b|\bprepared?\b|mixed_precision=|plan=\{|options=\{|\bzero=\d|num_items"
    r"|`accumulate`|save_state|\bload_state\b|set_seed|--procs"
)
# Parts that such a script does not reach: what stands there is met by other programs.
ELSEWHERE = (
    *(
        "cli",
        "launch",
        "planner",
        "watch",
    ),
    *("observe", "config"),
    *("paceline_large/context", "paceline_large/experts", "paceline_large/inference", "paceline_large/tensor"),
)
# Codes that its calls do not lead to.
NOT_MET = {
    # `accumulate`, items, closures and gathers are calls of our own loop; the engine has none of them.
    *("accumulate-outside", "items-count", "items-mixed", "optimizer-closure", "gather-scalar", "plan-accumulate"),
    *("seed-value", "batch-size-zero", "join-uneven", "anomaly-uneven", "anomaly-rollback", "resume-unused"),
    # `deepspeed.initialize` prepares one model, a loader that it has built, and an optimizer that it has checked.
    *("prepare-kind", "prepare-forgotten", "models-shared", "optimizer-shared", "plan-open", "step-closure"),
    # An engine's own methods write and read its checkpoints.
    *("checkpoint-missing", "checkpoint-unnamed", "checkpoint-stateless", "checkpoint-owners", "checkpoint-groups"),
    "checkpoint-value",
    # Batch norms have local statistics, and one rank has one share of the data.
    *("batch-norm-sequence", "batch-norm-double-backward", "inputs-differ"),
    # Of its pipelines the engine runs the schedule, and it names the blocks itself.
    *(
        "backward-pipeline",
        "pipeline-forward",
        "pipeline-blocks",
        "pipeline-order",
        "pipeline-calls",
        "pipeline-hidden",
    ),
    *("pipeline-skip", "pipeline-elsewhere"),
}
LOGGED = {"warning", "warn_once"}


def texts(node: ast.AST) -> str:
    """The texts in a call, with the values of f-strings left out."""
    constants = [
        part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    return " ".join(constants)


def messages() -> Iterator[tuple[str, str]]:
    """Yields each place with the texts that a script may read there."""
    makers = {name for name, kind in vars(paceline.base.errors).items() if isinstance(kind, type)}
    for path in sorted([*CORE.rglob("*.py"), *LARGE.rglob("*.py"), *ENGINE.rglob("*.py")]):
        part = next(part for part in (CORE, LARGE.parent, ENGINE.parent) if path.is_relative_to(part))
        where = path.relative_to(part).as_posix()
        if where.startswith(ELSEWHERE):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            if called not in makers | LOGGED:
                continue
            first = node.args[0] if node.args else None
            code = str(first.value) if isinstance(first, ast.Constant) else ""
            if code in NOT_MET or (called == "warn_once" and code == "data"):
                continue
            told = [keyword.value for keyword in node.keywords if keyword.arg == "fix"] or node.args[1:] or node.args
            if called == "Problem" and len(node.args) == 4:
                told = node.args[3:]
            for part in told:
                yield f"{where}:{node.lineno} [{code}]", texts(part)


def test_no_message_names_a_call_that_such_a_script_lacks() -> None:
    wording.use(PHRASES)
    wrong = []
    for place, text in messages():
        told = wording.worded(text)
        if NATIVE.search(told):
            wrong.append(f"{place} {told}")
    assert not wrong, "add a phrase to compat/deepspeed/phrases.py, or say why the code is not met:\n" + "\n".join(
        wrong
    )


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def engine_of(stage: int, model: Any = None, **arguments: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    return initialize(model=net() if model is None else model, config=config, **arguments)[0]


X = torch.ones(2, 4)


def step(engine: Any) -> None:
    engine.backward(engine(X).mean())
    engine.step()


def backward_by_hand(fixed: bool) -> None:
    engine = engine_of(2)
    loss = engine.module(X).mean()
    if fixed:
        engine.backward(loss)
    else:
        loss.backward()
    engine.optimizer.step()


def loss_of_two_numbers(fixed: bool) -> None:
    engine = engine_of(1)
    loss = engine(X)
    engine.backward(loss.mean() if fixed else loss)
    engine.step()


def copied(fixed: bool) -> None:
    model = net()
    copy_of_model = copy.deepcopy(model)
    engine = engine_of(3, model)
    if not fixed:
        copy.deepcopy(engine.module)
    engine_of(3, copy_of_model)
    step(engine)


def hooks(fixed: bool) -> None:
    model = net()
    first = model[0]
    assert isinstance(first, nn.Linear)
    if not fixed:
        first.weight.register_hook(lambda gradient: gradient * 2)
    engine = engine_of(3, model)
    engine.module[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    step(engine)


def several_dtypes(fixed: bool) -> None:
    model = net()
    model[0].to(torch.float64)
    if fixed:
        model.float()
    step(engine_of(3, model))


def lazy_layers(fixed: bool) -> None:
    model = nn.Sequential(nn.LazyLinear(1))
    if fixed:
        with torch.no_grad():
            model(X)
    step(engine_of(0, model))


def second_gradients(fixed: bool) -> None:
    engine = engine_of(2 if fixed else 3)
    x = X.clone().requires_grad_()
    loss = engine(x).mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    engine.backward(loss + gradient.square().sum())


def sparse_gradients(fixed: bool) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    engine_of(1 if fixed else 2, model, optimizer=torch.optim.SparseAdam(list(model.parameters())))


def engine_of_before(fixed: bool) -> None:
    model = net()
    first = engine_of(0, model)
    second = engine_of(0, model)
    step(second if fixed else first)


MET: dict[str, Callable[[bool], None]] = {
    "backward-missing": backward_by_hand,
    "backward-loss": loss_of_two_numbers,
    "model-copy": copied,
    "shard-hooks": hooks,
    "shard-dtypes": several_dtypes,
    "model-lazy": lazy_layers,
    "shard-double-backward": second_gradients,
    "zero-sparse": sparse_gradients,
    "deepspeed-optimizer-missing": engine_of_before,
}


def tried() -> dict[str, tuple[str, str]]:
    """Each program as it is wrong, and as its error says: the message of the first, and the error of the second."""
    seen = {}
    for code, program in MET.items():
        outcomes = []
        for fixed in (False, True):
            try:
                program(fixed)
                outcomes.append("")
            except PacelineError as error:
                outcomes.append(str(error))
        seen[code] = (outcomes[0], outcomes[1])
    return seen


def test_fixes_work_as_they_are_typed() -> None:
    for seen in run_ranks(tried, 2):
        for code, (wrong, fixed) in seen.items():
            assert f"[{code}]" in wrong and not NATIVE.search(wrong), wrong
            assert not fixed, fixed
