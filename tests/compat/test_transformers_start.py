"""What is left out as transformers is imported, and its default collation: on modules that stand in for its own."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from paceline.compat.collation import collate_through_arrays
from paceline.compat.transformers_imports import scan_models_once, without_scipy

LOSS = """from ..utils import is_scipy_available

if is_scipy_available():
    from scipy.optimize import linear_sum_assignment
"""


# -- files of models -----------------------------------------------------------------------------------------


def import_utils(package: Path) -> ModuleType:
    """A module that looks through folders, with a cache that holds one of them, and takes names from the last line."""
    module = ModuleType("transformers.utils.import_utils")
    module.__file__ = str(package / "utils" / "import_utils.py")
    module.scanned = []

    @functools.lru_cache(maxsize=1)
    def create_import_structure_from_path(module_path: Any) -> dict[Any, Any]:
        module.scanned.append(Path(module_path).name)
        folders = [path for path in Path(module_path).iterdir() if path.is_dir()]
        names = {path.stem: set(module.fetch__all__(path.read_text())) for path in Path(module_path).glob("*.py")}
        below = {path.name: module.create_import_structure_from_path(str(path)) for path in folders}
        return {frozenset(): names} | below

    def fetch_all(file_content: str) -> list[str]:
        lines = [line for line in file_content.splitlines() if line.startswith("__all__")]
        return lines[-1:]

    module.create_import_structure_from_path = create_import_structure_from_path
    module.fetch__all__ = fetch_all
    return module


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models of a package, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("models/albert", "models/bert", "utils"):
        (tmp_path / "transformers" / name).mkdir(parents=True)
    folder = tmp_path / "transformers" / "models"
    for name in ("albert", "bert"):
        (folder / name / "modeling.py").write_text("__all__ = 0\nx = '__all__'\n__all__ = 1\nrest\n")
    (folder / "__init__.py").write_text("__all__ = 2")
    (tmp_path / "transformers" / "utils" / "import_utils.py").write_text("")
    return folder


def scan(models: Path) -> tuple[Any, list[str]]:
    """What a process that imports transformers finds, and the folders that it looks through."""
    module = import_utils(models.parent)
    scan_models_once(module)
    structure = module.create_import_structure_from_path(str(models))
    # The package asks with its folder, the module of its models with its file, and each model with its own.
    assert module.create_import_structure_from_path(str(models / "__init__.py")) is structure
    assert module.create_import_structure_from_path(str(models / "bert" / "modeling.py")) == structure["bert"]
    return structure, sorted(module.scanned)


def test_the_files_of_models_are_looked_through_once(models):
    expected = import_utils(models.parent).create_import_structure_from_path(models)
    assert expected["bert"] == {frozenset(): {"modeling": {"__all__ = 1"}}}
    assert scan(models) == (expected, ["albert", "bert", "models"])
    assert scan(models) == (expected, [])


@pytest.mark.parametrize("change", ["a file", "a new file", "the code that looks", "a damaged cache", "no cache"])
def test_what_has_changed_is_looked_through_again(change, models):
    scan(models)
    [kept] = models.parent.with_name("cache").glob("paceline/*")
    if change == "a file":
        (models / "bert" / "modeling.py").write_text("__all__ = 7")
    elif change == "a new file":
        (models / "bert" / "tokenization.py").write_text("__all__ = 7")
    elif change == "the code that looks":
        (models.parent / "utils" / "import_utils.py").write_text("pass")
    elif change == "a damaged cache":
        kept.write_bytes(kept.read_bytes()[:-1])
    else:
        kept.unlink()
        kept.parent.rmdir()
        kept.parent.write_text("a file in the place of the folder, so nothing can be kept")
    expected = import_utils(models.parent).create_import_structure_from_path(models)
    assert scan(models) == (expected, ["albert", "bert", "models"])


@pytest.mark.parametrize("obstacle", ["a link that leads nowhere", "no home folder"])
def test_what_transformers_can_do_without_does_not_stop_its_import(obstacle, models, monkeypatch):
    if obstacle == "no home folder":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        (models / "bert" / "notes.txt").symlink_to("missing")
    assert scan(models)[1] == ["albert", "bert", "models"]


def test_a_release_that_looks_for_models_otherwise_is_left_alone():
    scan_models_once(module := ModuleType("transformers.utils.import_utils"))
    assert not hasattr(module, "create_import_structure_from_path")


# -- SciPy -----------------------------------------------------------------------------------------------------


def imported(source: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of losses, after it was imported inside the context."""
    utils = ModuleType("transformers.utils")
    utils.is_scipy_available = lambda: True
    monkeypatch.setitem(sys.modules, "transformers.utils", utils)
    monkeypatch.delitem(sys.modules, "scipy.optimize", raising=False)
    path.write_text(source)
    module = ModuleType("transformers.loss.loss_rt_detr")
    module.__file__ = str(path)
    optimizers = ModuleType("scipy.optimize")
    optimizers.linear_sum_assignment = lambda cost, maximize=False: (cost, maximize)
    monkeypatch.setitem(sys.modules, "scipy", ModuleType("scipy"))
    with without_scipy(module):
        module.is_scipy_available = utils.is_scipy_available
        if module.is_scipy_available():
            module.linear_sum_assignment = optimizers.linear_sum_assignment
    assert utils.is_scipy_available() and module.is_scipy_available()
    monkeypatch.setitem(sys.modules, "scipy.optimize", optimizers)
    return module


def test_scipy_is_imported_when_a_loss_first_needs_it(tmp_path, monkeypatch):
    module = imported(LOSS, tmp_path / "loss.py", monkeypatch)
    assert module.linear_sum_assignment.__name__ == "_linear_sum_assignment"
    assert module.linear_sum_assignment(3, maximize=True) == (3, True)


@pytest.mark.parametrize("more", ["\nif is_scipy_available():\n    x = 1\n", "\nimport scipy.optimize\n"])
def test_a_module_that_uses_scipy_otherwise_imports_it_itself(more, tmp_path, monkeypatch):
    module = imported(LOSS + more, tmp_path / "loss.py", monkeypatch)
    assert module.linear_sum_assignment.__name__ == "<lambda>"


# -- collation -------------------------------------------------------------------------------------------------


def collations() -> tuple[Any, Any]:
    """One that makes tensors of lists and stacks tensors; and the same, mended."""

    def collate(features: Any) -> dict[str, Any]:
        batch = {}
        for name, value in features[0].items():
            values = [sample[name] for sample in features]
            batch[name] = torch.stack(values) if isinstance(value, torch.Tensor) else torch.tensor(values)
        return batch

    module = ModuleType("transformers.data.data_collator")
    module.torch_default_data_collator = collate
    collate_through_arrays(module)
    return collate, module.torch_default_data_collator


@pytest.mark.parametrize(
    "samples",
    [
        [{"input_ids": [1, 2, 3], "labels": [4, -100, 6]}, {"input_ids": [7, 8, 9], "labels": [1, 2, 2**62]}],
        [{"a": [1.5, 2.0], "b": [True, False]}, {"a": [2.5, 3.0], "b": [True, True]}],
        [{"a": [1, 2.5], "b": []}, {"a": [2, 3], "b": []}],
        [{"a": [[1, 2], [3, 4]]}, {"a": [[5, 6], [7, 8]]}],
        [{"a": [1, True], "b": 3}, {"a": [2, False], "b": 4}],
        [{"a": torch.ones(2), "b": [1]}, {"a": torch.zeros(2), "b": [2]}],
    ],
)
def test_a_batch_is_the_same(samples):
    collate, mended = collations()
    expected, batch = collate(samples), mended(samples)
    assert list(batch) == list(expected)
    for name, tensor in expected.items():
        assert batch[name].dtype == tensor.dtype and batch[name].stride() == tensor.stride()
        assert torch.equal(batch[name], tensor)


@pytest.mark.parametrize("rows", [([1, 2], [3]), ([2**64], [1]), ([1], None)])
def test_an_error_is_the_same(rows):
    samples = [{"a": row} for row in rows]
    errors = []
    for collate in collations():
        with pytest.raises((ValueError, RuntimeError, TypeError, OverflowError)) as caught:
            collate(samples)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_tensors_are_made_on_the_default_device():
    _, mended = collations()
    with torch.device("meta"):
        assert mended([{"a": [1, 2]}])["a"].device.type == "meta"
