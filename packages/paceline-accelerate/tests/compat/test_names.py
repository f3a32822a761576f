"""accelerate's names are all there; what is not carried says so when it is used, and never before."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import json
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType

import pytest

import paceline_accelerate as table
from paceline import CompatError
from paceline.compat import install
from paceline_accelerate.neighbours import Mender
from paceline_doors.absent import absent
from paceline_doors.served import Server

REFERENCE = Path(__file__).parent / "reference"


@pytest.fixture(autouse=True)
def served(serve) -> None:
    serve("accelerate")


# -- importing -----------------------------------------------------------------------------------------------


@pytest.mark.needs("deepspeed")
@pytest.mark.parametrize("module", sorted(table.modules()))
def test_every_name_of_the_real_library_can_be_imported(module: str) -> None:
    served = importlib.import_module(module)
    for name in table.modules()[module]:
        assert getattr(served, name) is not None, name
    assert set(dir(served)) == table.modules()[module] | set(table.IMPORTED_WITH.get(module, "").split())


@pytest.mark.needs("deepspeed")
def test_a_star_gives_the_modules_that_the_package_imports() -> None:
    names: dict[str, object] = {}
    exec("from accelerate import *", names)
    assert names["state"] is sys.modules["accelerate.state"] and "test_utils" not in names
    exec("from accelerate.utils import *", names)
    assert names["dataclasses"] is sys.modules["accelerate.utils.dataclasses"]
    assert names["other"] is sys.modules["accelerate.utils.other"]
    assert not {"deepspeed", "rich", "_filter_args"} & names.keys(), "they would hide other libraries"


def test_a_module_with_the_name_of_its_function() -> None:
    import accelerate.utils
    import accelerate.utils.tqdm
    from accelerate.utils.tqdm import tqdm

    assert accelerate.utils.tqdm is tqdm and list(tqdm(range(2), disable=True)) == [0, 1]


def test_a_module_is_imported_by_its_full_name() -> None:
    assert __import__("accelerate.utils", fromlist=[""]) is sys.modules["accelerate.utils"]


def test_names_that_are_carried_exist_in_the_real_library() -> None:
    known = {name for names in table.modules().values() for name in names}
    known |= {f"{module}.{name}" for module, names in table.modules().items() for name in names}
    assert not table.carried().keys() - known


def test_a_name_that_never_existed_is_an_import_error_with_the_nearest_one() -> None:
    with pytest.raises(ImportError, match="Did you mean: 'set_seed'"):
        from accelerate.utils import set_sed  # noqa: F401
    with pytest.raises(ImportError, match=r"cannot import name 'nothing_like_it' .*served by Paceline"):
        from accelerate import nothing_like_it  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        import accelerate.nothing_like_it
    import accelerate

    assert not hasattr(accelerate, "nothing_like_it")
    import accelerate.utils

    with pytest.raises(
        AttributeError, match=r"module 'accelerate.utils' \(served by Paceline\) has no attribute '__file__'"
    ):
        print(accelerate.utils.__file__)
    assert importlib.util.find_spec("accelerate.nothing_like_it") is None


def test_all_names_of_a_module_at_once() -> None:
    names: dict[str, object] = {}
    exec("from accelerate.utils.dataclasses import *", names)
    assert table.modules()["accelerate.utils.dataclasses"] <= names.keys()


def test_one_name_is_one_object_in_every_module() -> None:
    import accelerate
    import accelerate.accelerator
    from accelerate.utils import DistributedType
    from accelerate.utils.dataclasses import DistributedType as again

    assert accelerate.Accelerator is accelerate.accelerator.Accelerator
    assert DistributedType is again is accelerate.DistributedType
    assert DistributedType.MULTI_CPU == "MULTI_CPU"
    assert accelerate.utils.set_seed is accelerate.utils.random.set_seed


def test_the_library_seems_installed() -> None:
    assert importlib.metadata.version("accelerate") == table.VERSION
    assert importlib.metadata.packages_distributions()["accelerate"] == ["accelerate"]
    assert importlib.util.find_spec("accelerate") is not None
    import accelerate

    assert accelerate.__version__ == table.VERSION


def test_it_seems_installed_to_a_script_that_sets_its_path_anew(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "for_children" not in path])
    assert importlib.metadata.version("accelerate") == table.VERSION


def test_installing_twice_changes_nothing() -> None:
    install(["accelerate"])
    for kind in (Server, Mender):
        assert sum(isinstance(finder, kind) for finder in sys.meta_path) == 1


def test_nothing_heavy_is_loaded_to_serve_names() -> None:
    program = (
        "import sys; from paceline.compat import install; install(['accelerate'])\n"
        "import accelerate.utils; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        ("accelerate.utils.bnb", "get_quantized_model_device_map", "one device"),
        ("accelerate.utils.bnb", "quantize_and_offload_8bit", "one device"),
        ("accelerate.commands.launch", "tpu_launcher", "TPU"),
        ("accelerate.utils.launch", "prepare_tpu", "TPU"),
        ("accelerate.utils", "prepare_multi_gpu_env", "paceline launch"),
        ("accelerate.commands.launch", "_validate_launch_command", "paceline launch"),
        ("accelerate.commands.launch", "sagemaker_launcher", "SageMaker"),
        ("accelerate.commands.config.config", "get_sagemaker_input", "SageMaker"),
        ("accelerate.utils", "MegatronLMPlugin", "Megatron-LM"),
        ("accelerate.utils.megatron_lm", "initialize", "Megatron-LM"),
        ("accelerate.utils", "convert_model", "torchao"),
        ("accelerate.inference", "build_pipeline", "prepare_pippy"),
        ("accelerate.commands.estimate", "verify_on_hub", "network"),
    ],
)
def test_the_reason_is_that_of_the_name(module: str, name: str, reason: str) -> None:
    with pytest.raises(CompatError, match="compat-name") as caught:
        getattr(importlib.import_module(module), name)()
    assert reason in str(caught.value)


def test_every_name_that_is_refused_has_a_reason_of_its_own() -> None:
    default = table.native_way("accelerate.no_such_thing")
    refused = []
    for module, names in table.modules().items():
        for name in names:
            is_carried = f"{module}.{name}" in table.carried() or name in table.carried()
            if not is_carried and f"{module}.{name}" not in table.modules():
                refused.append(f"{module}.{name}")
    without_reason = [name for name in refused if table.native_way(name) == default]
    # Left over from loops in the module.
    assert set(without_reason) == {"accelerate.data_loader.additional_kwargs", "accelerate.data_loader.v"}


# -- signatures ----------------------------------------------------------------------------------------------


@pytest.mark.needs("deepspeed")
def test_what_is_carried_takes_the_real_keywords() -> None:
    import accelerate

    listed = json.loads((REFERENCE / "signatures.json").read_text(encoding="utf-8"))
    wrong = []
    for name, wanted in listed.items():
        owner, _, member = name.rpartition(".")
        if owner:
            kind = getattr(accelerate.state, owner, None) or getattr(accelerate, owner)
            where, member = kind, member
        else:
            if name not in table.carried() or name in _OTHER_INSIDE:
                continue
            module, _, member = table.carried()[name].partition(":")
            where = importlib.import_module(module)
        if not hasattr(where, member):
            wrong += [] if name in _IN_INSTANCES else [f"{name} is missing"]
            continue
        # How an enumeration is called is Python's own affair, which changed it in 3.12.
        if wanted is None or (isinstance(getattr(where, member), type) and issubclass(getattr(where, member), Enum)):
            continue
        ours = inspect.signature(getattr(where, member)).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in ours.values()):
            lacking = [each for each in wanted if each not in ours]
            wrong += [f"{name} takes no {', '.join(lacking)}"] if lacking else []
    assert not wrong, "\n".join(wrong)


# Classes that scripts get from `prepare` and do not make themselves; a function of the same name in another module.
_OTHER_INSIDE = {"DataLoaderDispatcher", "DataLoaderShard", "prepare_data_loader", "DataLoaderStateMixin"}
# Set by constructors, or raising there too.
_IN_INSTANCES = {"Accelerator.device", "Accelerator.parallelism_config", "Accelerator.project_dir",
                 "Accelerator.context_parallel_rank", "Accelerator.pipeline_parallel_rank", "AcceleratorState.is_fsdp2",
                 "AcceleratorState.mixed_precision", "AcceleratorState.get_deepspeed_plugin",
                 "AcceleratorState.select_deepspeed_plugin"}  # fmt: skip


# -- what is not carried -------------------------------------------------------------------------------------


def test_using_a_name_that_is_not_carried_names_the_native_way() -> None:
    from accelerate.utils import TERecipeKwargs
    from accelerate.utils.megatron_lm import MegatronEngine

    with pytest.raises(CompatError, match=r"(?s)\[compat-name\].*plan=\{'tp'"):
        MegatronEngine([])
    with pytest.raises(CompatError, match=r"(?s)\[compat-name\].*mixed_precision='fp8'"):
        TERecipeKwargs()
    with pytest.raises(CompatError, match=r"MegatronEngine\.lr"):
        MegatronEngine.lr  # noqa: B018


@pytest.mark.needs("deepspeed")
def test_what_transformers_imports_where_deepspeed_is_there() -> None:
    from accelerate.utils import DeepSpeedSchedulerWrapper
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    assert isinstance(DeepSpeedSchedulerWrapper, type), "its Trainer asks `isinstance` of it"
    assert HfDeepSpeedConfig({"zero_optimization": {"stage": 3}}).is_zero3(), "its own config classes inherit from it"


def test_a_stand_in_can_be_inherited_from_and_asked_for() -> None:
    Stand = absent("accelerate.hooks.ModelHook", "why", "fix")

    class Mine(Stand):
        def pre_forward(self):
            return 1

    assert not isinstance(3, Stand) and Mine.pre_forward is not None
    assert "not carried" in repr(Stand) and Stand == Stand and Stand != Mine and len({Stand, Mine}) == 2
    for use in (
        Mine,
        lambda: list(Stand),
        lambda: len(Stand),
        lambda: Stand["a"],
        lambda: 1 in Stand,
        lambda: Stand == "a",
    ):
        with pytest.raises(CompatError, match="compat-name"):
            use()


def test_a_library_that_is_too_old_is_told_of_with_its_version(monkeypatch) -> None:
    from paceline_accelerate import neighbours

    versions = {"transformers": "4.31.0", "peft": "999.1"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    [notice] = neighbours.too_old()
    assert notice.startswith("transformers 4.31.0 is older than 4.57.6")


def test_an_unknown_library_and_one_that_is_imported_already(monkeypatch) -> None:
    with pytest.raises(CompatError, match=r"\[compat-library\]"):
        install(["lightning"])
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, Server)])
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    with pytest.raises(CompatError, match=r"\[compat-imported\]"):
        install(["accelerate"])


# -- the command ---------------------------------------------------------------------------------------------


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "paceline.compat", *words]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_runs_a_script_or_a_module(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    text = "import sys, accelerate, beside\nprint(__name__, sys.argv[1:], accelerate.__version__, beside.NAME)\n"
    (tmp_path / "script.py").write_text(text)
    for words in (["script.py", "-m", "x"], ["-m", "script", "-m", "x"]):
        assert run(*words, folder=tmp_path).stdout == f"__main__ ['-m', 'x'] {table.VERSION} beside\n"


@pytest.mark.needs("deepspeed")
def test_deepspeed_seems_installed_where_the_launcher_asks_for_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    (tmp_path / "script.py").write_text("from importlib.metadata import version\nprint(version('deepspeed'))\n")
    assert run("--compat", "accelerate", "script.py", folder=tmp_path).returncode == 0


def test_the_command_without_a_script_says_how_it_is_used(tmp_path: Path) -> None:
    ended = run(folder=tmp_path)
    assert ended.returncode == 2 and ended.stderr.startswith("usage: python -m paceline.compat")
    assert run("--help", folder=tmp_path).returncode == 0


def test_a_module_that_is_still_being_imported_is_changed_at_a_later_import(monkeypatch) -> None:
    import sys
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from paceline_accelerate.neighbours import Mender

    changed: list[ModuleType] = []
    module = ModuleType("half_imported")
    spec = module.__spec__ = ModuleSpec("half_imported", None)
    spec._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "half_imported", module)
    mender = Mender({"half_imported": changed.append})
    mender.mend_imported("half_imported")
    mender.find_spec("another")
    assert not changed
    spec._initializing = False  # type: ignore[attr-defined]
    mender.find_spec("another")
    mender.find_spec("another")
    assert changed == [module]


def test_two_finders_that_ask_the_others_do_not_ask_each_other_for_ever(monkeypatch) -> None:
    import sys
    from importlib.util import find_spec

    from paceline_accelerate.neighbours import Mender

    changed: list[str] = []
    menders = [Mender({"colorsys": lambda module: changed.append(module.__name__)}) for _ in range(2)]
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setattr(sys, "meta_path", [*menders, *sys.meta_path])
    assert find_spec("colorsys") is not None
    __import__("colorsys")
    assert changed == ["colorsys"] * 2
