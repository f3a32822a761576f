"""`save_fsdp_optimizer` and `load_fsdp_optimizer` under each way of dividing states: what comes back is what was there."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.base.errors import CheckpointError, CompatError
from paceline.testing import run_ranks
from paceline_accelerate.accelerator import Accelerator
from paceline_accelerate.arguments import ProjectConfiguration
from paceline_accelerate.module_classes import get_module_class_from_name
from paceline_accelerate.sharded import (
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from paceline_large.optim.lamb import Lamb
from paceline_large.optim.lion import Lion

OPTIMIZERS = {"AdamW": torch.optim.AdamW, "Lion": Lion, "Lamb": Lamb}  # Lamb's states are whole, each on one rank


def steps(settings: dict[str, object], kind: str, folder: str, resume: bool) -> dict[str, list[float]]:
    """Two steps, saved after the first; or the second one alone, from what the first one left."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = OPTIMIZERS[kind](module.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(module, optimizer)
    weights = Path(folder) / "weights.pt"
    if resume:
        with accelerator.full_parameters(model, writeback=True):
            accelerator.unwrap_model(model).load_state_dict(torch.load(weights, weights_only=True))
        load_fsdp_optimizer(None, accelerator, optimizer, model, folder)
    for number in range(1 if resume else 2):
        loss = model(torch.ones(4, 3)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if not resume and number == 0:
            save_fsdp_optimizer(None, accelerator, optimizer, model, folder)
            state = accelerator.get_state_dict(model)
            if accelerator.is_main_process:
                torch.save(state, weights)
            accelerator.wait_for_everyone()
    return {name: value.flatten().tolist() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_saved_optimizer_goes_on_at_the_same_place(tmp_path: Path, zero: int, kind: str) -> None:
    env = {"PACELINE_SHARD": "2", "PACELINE_ZERO": str(zero)}
    want = run_ranks(steps, 2, args=({}, kind, str(tmp_path), False), env=env)[0]
    saved = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    assert sorted(saved["state"]) == sorted(want)
    assert run_ranks(steps, 2, args=({}, kind, str(tmp_path), True), env=env)[0] == want
    alone = run_ranks(steps, 1, args=({}, kind, str(tmp_path), True))[0]
    for name, values in want.items():
        assert alone[name] == pytest.approx(values, abs=1e-6), "one process takes it too"


def undivided_steps(folder: str, resume: bool) -> dict[str, list[float]]:
    """Two steps, saved after the first under the names that transformers' Trainer uses on one process; or the second alone."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1 if resume else 0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    groups = [{"params": [module[0].weight, module[2].weight]}, {"params": [module[0].bias, module[2].bias], "lr": 0.2}]
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(groups, lr=0.1))
    if resume:
        load_fsdp_model(None, accelerator, model, folder)
        load_fsdp_optimizer(None, accelerator, optimizer, model, folder)
    for number in range(1 if resume else 2):
        accelerator.backward(model(torch.ones(4, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if not resume and number == 0:
            save_file(
                {name: value.clone() for name, value in module.state_dict().items()}, f"{folder}/model.safetensors"
            )
            torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
    return {name: value.flatten().tolist() for name, value in accelerator.get_state_dict(model).items()}


def test_a_divided_model_goes_on_from_the_files_of_one_process(tmp_path: Path) -> None:
    (want,) = run_ranks(undivided_steps, 1, args=(str(tmp_path), False))
    env = {"PACELINE_SHARD": "2", "PACELINE_ZERO": "3"}
    for found in run_ranks(undivided_steps, 2, args=(str(tmp_path), True), env=env):
        for name, values in want.items():
            assert found[name] == pytest.approx(values, abs=1e-6)


# -- divided files ----------------------------------------------------------------------------------------------------


def divided_steps(folder: str, resume: bool) -> dict[str, list[float]]:
    """Two steps, with each rank's part saved after the first; or the second one alone, from what the first one left."""
    from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1 if resume else 0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(module, optimizer)
    if resume:
        load_fsdp_model(plugin, accelerator, model, folder)
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    for number in range(1 if resume else 2):
        accelerator.backward(model(torch.ones(4, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if not resume and number == 0:
            for _ in range(2):  # the second one replaces the first
                save_fsdp_model(plugin, accelerator, model, folder)
                save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
            saved = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
            divided = Path(folder) / "pytorch_model_fsdp_0"
            merge_fsdp_weights(divided, Path(folder) / "merged", remove_checkpoint_dir=False)
            accelerator.wait_for_everyone()
            merged = load_file(Path(folder) / "merged" / "model.safetensors")
            assert all(torch.equal(merged[name], value) for name, value in saved.items())
    return {name: value.flatten().tolist() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_each_rank_writes_its_part_and_any_number_reads_them(tmp_path: Path, zero: int) -> None:
    env = {"PACELINE_SHARD": "2", "PACELINE_ZERO": str(zero)} if zero else {}
    # A folder of the user's whose name holds both stems was taken for the divided folder itself, and emptied.
    folder = tmp_path / "optimizer_of_pytorch_model_fsdp"
    folder.mkdir()
    (folder / "notes.txt").touch()
    want = run_ranks(divided_steps, 2, args=(str(folder), False), env=env)[0]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["merged", "notes.txt", "optimizer_0", "pytorch_model_fsdp_0"], "and nothing half written"
    assert run_ranks(divided_steps, 2, args=(str(folder), True), env=env)[0] == want
    alone = run_ranks(divided_steps, 1, args=(str(folder), True))[0]
    for name, values in want.items():
        assert alone[name] == pytest.approx(values, abs=1e-6), "one process takes it too"


def saves_above_a_limit(folder: str) -> list[str]:
    """Saves a divided model three times under automatic names, and goes on in a second run, with room for two."""
    for num_saves in (3, 1):
        configuration = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
        accelerator = Accelerator(cpu=True, project_config=configuration)
        model = nn.Linear(4, 2)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        if num_saves == 1:
            accelerator.load_state()
        for _ in range(num_saves):
            accelerator.save_state()
        accelerator.free_memory()
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


def test_a_limit_counts_for_divided_models_too(tmp_path: Path) -> None:
    env = {"PACELINE_SHARD": "2", "PACELINE_ZERO": "3"}
    assert run_ranks(saves_above_a_limit, 2, args=(str(tmp_path),), env=env)[0] == ["checkpoint_2", "checkpoint_3"]


def test_what_cannot_be_saved_or_is_not_there(tmp_path: Path) -> None:
    from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(CompatError, match="LOCAL_STATE_DICT"):
        plugin = FullyShardedDataParallelPlugin(state_dict_type="LOCAL_STATE_DICT")
        save_fsdp_model(plugin, accelerator, model, tmp_path)
    divided = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    for use in (save_fsdp_model, load_fsdp_model):
        with pytest.raises(CompatError, match="use_dcp=False"):
            use(divided, accelerator, model, tmp_path, use_dcp=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"\[checkpoint-missing\]"):
        load_fsdp_model(None, accelerator, model, tmp_path)


def adapter_alone(folder: str, version: int) -> tuple[list[str], list[float]]:
    """Names that an adapter is saved under, and its values after it was loaded again."""
    from paceline.compat import install

    install(["accelerate"])  # which peft imports
    from peft import LoraConfig, get_peft_model

    from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True)
    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = accelerator.prepare(get_peft_model(base, LoraConfig(r=2, target_modules=["0"])))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="FULL_STATE_DICT")
    weight = model.base_model.model[0].lora_B["default"].weight
    with torch.no_grad():
        weight.fill_(3.0)
    save_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
    with torch.no_grad():
        weight.zero_()
    load_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
    saved = torch.load(Path(folder, "pytorch_model_fsdp.bin"), weights_only=True)
    return sorted(saved), weight.unique().tolist()


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed: it would bring accelerate")
@pytest.mark.parametrize(("version", "middle"), [(1, ""), (2, ".default")])
def test_the_adapter_alone(tmp_path: Path, version: int, middle: str) -> None:
    """FSDP 2 of accelerate names it as the model does, version 1 as peft does; both are read."""
    names, values = run_ranks(adapter_alone, 1, args=(str(tmp_path), version))[0]
    assert names == [f"base_model.model.0.lora_{part}{middle}.weight" for part in "AB"] and values == [3.0]


def test_units_compute_again(tmp_path: Path) -> None:
    from paceline_accelerate.fsdp_modules import fsdp2_apply_ac
    from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin

    calls = []
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].register_forward_pre_hook(lambda *_: None)
    original = model[0].forward
    model[0].forward = lambda value: (calls.append(1), original(value))[1]
    names = list(model.state_dict())
    accelerator.state.__dict__["fsdp_plugin"] = plugin
    assert fsdp2_apply_ac(accelerator, model) is model and list(model.state_dict()) == names
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert len(calls) == 2, "once forward and once again in the backward pass"


# -- modules ----------------------------------------------------------------------------------------------------------


def test_functions_about_modules(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from paceline_accelerate import fsdp_modules
    from paceline_accelerate.parallelism_config import ParallelismConfig

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Embedding(3, 2), nn.Linear(2, 2), nn.Linear(2, 3, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    assert get_module_class_from_name(model, "Linear") is nn.Linear
    assert get_module_class_from_name(model, "Conv2d") is None
    assert len(fsdp_modules.get_parameters_from_modules("block|emb.*", model, "cpu")) == 3
    assert fsdp_modules.get_parameters_from_modules(None, model, "cpu") == set()
    assert len(fsdp_modules.get_parameters_from_modules([model.head], model, "cpu")) == 1
    names = {"_orig_mod.a._checkpoint_wrapped_module.b": 1, "module.x": 2}
    assert fsdp_modules.fsdp2_canonicalize_names(names) == {"a.b": 1, "module.x": 2}
    with torch.device("meta"):
        model = Tied()
    initialise = fsdp_modules.ensure_weights_retied(lambda module: module.to_empty(device="cpu"), model, "cpu")
    for module in (model.embed, model.block, model.head):
        initialise(module)
    assert model.head.weight is model.embed.weight and not model.block.weight.is_meta
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = {parameter.data_ptr(): nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()}
    fsdp_modules.fsdp2_switch_optimizer_parameters(optimizer, other)
    assert set(optimizer.param_groups[0]["params"]) == set(other.values())
    with pytest.raises(KeyError):
        fsdp_modules.fsdp2_switch_optimizer_parameters(optimizer, {})
    policy = fsdp_modules.fsdp2_prepare_auto_wrap_policy

    def plugin(**fields):
        return SimpleNamespace(**{"transformer_cls_names_to_wrap": None, "min_num_params": None, **fields})

    by_class = policy(
        plugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Linear"]), model
    )
    by_size = policy(plugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=6), model)
    assert [by_class(module) for module in (model.block, model.embed)] == [True, False]
    assert [by_size(module) for module in (model, model.block)] == [True, False]
    assert policy(plugin(auto_wrap_policy="NO_WRAP"), model) is None
    with pytest.raises(CompatError, match="Missing"):
        policy(plugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Missing"]), model)
    assert ParallelismConfig(dp_shard_size=2).fsdp_dim_names == ["dp_shard_cp"]
    assert ParallelismConfig(dp_shard_size=2, dp_replicate_size=2).fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]


def test_a_whole_state_of_rank_0_reaches_all(tmp_path: Path) -> None:
    for state in run_ranks(whole_state, 2, env={"PACELINE_SHARD": "2"}):
        assert state == [[1.0, 1.0], [1.0, 1.0]]


def whole_state() -> list[list[float]]:
    """Loads a state that rank 0 alone has."""
    from paceline_accelerate.fsdp_modules import fsdp2_load_full_state_dict, fsdp2_prepare_model

    accelerator = Accelerator(cpu=True)
    model = fsdp2_prepare_model(accelerator, nn.Linear(2, 2, bias=False))
    state = {"weight": torch.ones(2, 2)} if accelerator.is_main_process else {}
    fsdp2_load_full_state_dict(accelerator, model, state)
    return accelerator.get_state_dict(model)["weight"].tolist()


# -- the real accelerate's folder -----------------------------------------------------------------------------------------

RECORDED = Path(__file__).parent / "reference" / "recorded_fsdp_sharded"


def go_on_from_recorded(folder: str) -> dict[str, list[float]]:
    """A step after what the real accelerate saved with FSDP 2 on two processes."""
    import sys

    sys.path.insert(0, str(RECORDED.parent))
    import fsdp_sharded_program as program

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*program.build(1))
    load_fsdp_model(None, accelerator, model, folder)
    load_fsdp_optimizer(None, accelerator, optimizer, model, folder)
    program.step(accelerator, model, optimizer)
    return program.weights(accelerator, model)


@pytest.mark.parametrize(("size", "zero"), [(1, "0"), (2, "2"), (2, "3")])
def test_a_folder_of_the_real_one_is_gone_on_from(size: int, zero: str) -> None:
    expected = json.loads((RECORDED / "after.json").read_text(encoding="utf-8"))
    env = {"PACELINE_SHARD": "2", "PACELINE_ZERO": zero} if size == 2 else {}
    found = run_ranks(go_on_from_recorded, size, args=(str(RECORDED),), env=env)[0]
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, abs=1e-6), name
