"""What type checkers see: of the public API each name, its types, and nothing that is misspelt; of the package no error."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

# The doors imitate what other libraries take, and `torch_internals` hands on what torch does not type: their types are checked
# too, but may be `Any`.
OF_ANY_KIND = {"paceline_accelerate", "paceline_deepspeed", "torch_internals"}
LARGEST_SHARE_OF_ANY = 0.03

# A torch of a few names: analysing the real one takes 20 s. The types are Paceline's own.
STUBS = {
    "torch/__init__.pyi": """
        from typing import Any
        from . import nn as nn, optim as optim
        class Tensor:
            def sum(self) -> Tensor: ...
        def ones(*size: int) -> Tensor: ...
        def __getattr__(name: str) -> Any: ...
    """,
    "torch/nn.pyi": """
        from typing import Any, Iterator
        class Module:
            def __call__(self, *args: Any) -> Any: ...
            def parameters(self) -> Iterator[Any]: ...
        def __getattr__(name: str) -> Any: ...
    """,
    "torch/optim.pyi": """
        from typing import Any
        class Optimizer: ...
        class AdamW(Optimizer):
            def __init__(self, params: Any) -> None: ...
        def __getattr__(name: str) -> Any: ...
    """,
    "torch/utils/__init__.pyi": "",
    "torch/utils/data.pyi": """
        from typing import Any, Generic, Iterator, TypeVar
        Batch = TypeVar("Batch", covariant=True)
        class DataLoader(Generic[Batch]):
            def __init__(self, dataset: list[Batch]) -> None: ...
            def __iter__(self) -> Iterator[Batch]: ...
        def __getattr__(name: str) -> Any: ...
    """,
}
CONFIG = """
[mypy]
strict = true
mypy_path = stubs
[mypy-torch.*,numpy.*]
follow_imports = skip
"""
# A line ends in what mypy says of it: a type, or the code of an error. The others must be clean.
PROGRAM = """
import paceline
import torch
from torch import nn
from torch.utils.data import DataLoader
from paceline import Accelerator, Keep, LocalSGD, PlanError, find_executable_batch_size, set_seed, skip_first_batches
from paceline import Acelerator  # attr-defined
from paceline.testing import Fault, run_ranks
from paceline.testing import run_rank  # attr-defined
from paceline.checkpoint import Chekpointer  # attr-defined

class Net(nn.Module):
    def width(self) -> int:
        return 3

set_seed(0)
accelerator = Accelerator("bf16", keep=Keep(last=2), plan={"shard": 2})
net = Net()
optimizer = torch.optim.AdamW(net.parameters())
loader = DataLoader([torch.ones(3)])
reveal_type(accelerator.prepare(net))  # user.Net
reveal_type(accelerator.prepare(net, optimizer))  # tuple[user.Net, torch.optim.AdamW]
reveal_type(accelerator.prepare(net, loader)[1])  # torch.utils.data.DataLoader[torch.Tensor]
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
net = accelerator.prepare_model(net)
loader = accelerator.prepare_data_loader(loader)
optimizer = accelerator.prepare_optimizer(optimizer)
parts = (net, optimizer)
reveal_type(accelerator.prepare(*parts))  # tuple[user.Net, torch.optim.AdamW]

def prepare_many(models: list[nn.Module]) -> None:
    teacher, student = accelerator.prepare(*models)
    reveal_type(teacher)  # torch.nn.Module

for epoch in range(accelerator.resume().epoch, 3):
    for batch in loader:
        reveal_type(batch)  # torch.Tensor
        with accelerator.accumulate(net):
            accelerator.backward(batch.sum(), retain_graph=True)
            accelerator.backward(batch.sum(), retan_graph=True)  # call-arg
        reveal_type(accelerator.reduce(batch.sum(), "mean"))  # torch.Tensor
        reveal_type(accelerator.gather_for_metrics((batch, batch)))  # tuple[torch.Tensor, torch.Tensor]
        reveal_type(accelerator.gather_for_metrics(batch, use_gather_object=True))  # Any
reveal_type(accelerator.unwrap_model(net).width())  # int
reveal_type(accelerator.save_state("saved", background=True))  # str | None
accelerator.save_state(totl_limit=3)  # call-arg
Accelerator(mixed_precison="bf16")  # call-arg
Accelerator(mixed_precision="bfloat16")  # arg-type
paceline.nothing  # attr-defined
reveal_type(skip_first_batches(loader, 3))  # torch.utils.data.DataLoader[torch.Tensor]
reveal_type(run_ranks(lambda: 3, 2))  # list[int]

@find_executable_batch_size(starting_batch_size=64)
def train(batch_size: int, rate: float) -> str:
    return "trained"

reveal_type(train(0.1))  # str

@accelerator.on_main_process
def say(words: str) -> int:
    return len(words)

reveal_type(say("words"))  # int | None
with LocalSGD(accelerator, net, 8) as local:
    local.step()
try:
    accelerator.end_training()
except PlanError as error:
    reveal_type(error.code)  # str
"""


def write(folder: Path) -> None:
    (folder / "user.py").write_text(PROGRAM)
    (folder / "mypy.ini").write_text(CONFIG)
    for name, text in STUBS.items():
        path = folder / "stubs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line[8:] for line in text.splitlines()))


def test_a_type_checker_sees_each_name_and_keeps_the_types_of_what_is_prepared(tmp_path) -> None:
    write(tmp_path)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "/dev/null", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    said: dict[int, str] = {}
    for number, revealed, code in re.findall(
        r'^user.py:(\d+): (?:note: Revealed type is "(.*)"|error: .*\[(.*)\])', done.stdout, re.M
    ):
        said[int(number)] = revealed or code
    expected = {number: line.split("  # ")[1] for number, line in enumerate(PROGRAM.splitlines(), 1) if "  # " in line}
    assert said == expected, done.stdout + done.stderr


@pytest.mark.timeout(600)  # 25 s without mypy's cache on a quiet machine
def test_the_package_has_no_error_of_types(root) -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=root, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr


def test_few_parameters_are_of_any_kind(modules) -> None:
    total: Counter[str] = Counter()
    of_any_kind: Counter[str] = Counter()
    for module in modules.values():
        package = module.room if "/" in module.where.removeprefix("packages/paceline/src/paceline/") else "the facade"
        for node in module.nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            given = node.args
            parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            typed = [parameter for parameter in parameters if parameter and parameter.arg not in ("self", "cls")]
            total[package] += len(typed)
            of_any_kind[package] += sum(
                isinstance(parameter.annotation, ast.Name) and parameter.annotation.id == "Any" for parameter in typed
            )
    shares = {package: of_any_kind[package] / count for package, count in total.items() if count}
    wrong = [
        f"{package}: {share:.1%}"
        for package, share in shares.items()
        if share > LARGEST_SHARE_OF_ANY and package not in OF_ANY_KIND
    ]
    assert not wrong, "say what these take, or `object` where they take all: " + ", ".join(wrong)


def test_the_marker_of_typed_packages_is_there(root) -> None:
    assert (root / "packages/paceline/src/paceline/py.typed").exists()


@pytest.mark.parametrize(
    "package", ["paceline", "paceline.checkpoint", "paceline.optim", "paceline.testing", "paceline_large.inference"]
)
def test_the_three_lists_of_public_names_agree(package) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    (block,) = [node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING"]
    imported = {
        name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names
    }
    loaded = {name: where if "." in where else f"{package}.{where}" for name, where in module._WHERE.items()}
    assert imported == loaded, "what type checkers see, and what is loaded on first use"
    assert sorted({*module.__all__} - {"__version__"}) == sorted(imported)
