"""accelerate's FSDP, axes and dynamo: every field has its row, and every row says what it says."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, CPUOffloadPolicy, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from paceline.base import env
from paceline.base.errors import CompatError, ConfigError
from paceline.config import resolve_run
from paceline.config.overrides import Overrides
from paceline.plan.options import read
from paceline_accelerate.accelerator import Accelerator
from paceline_accelerate.engine_fields import FIELDS, PLUGIN
from paceline_accelerate.fsdp import said_by
from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin
from paceline_accelerate.parallelism_config import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from paceline_accelerate.plugins import TorchDynamoPlugin, TorchTensorParallelPlugin
from paceline_doors.cases import fits

KNOWN = json.loads((Path(__file__).parent / "reference" / "engines.json").read_text(encoding="utf-8"))
SWITCH = {"use_fsdp"}


# -- the table -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", sorted(KNOWN["fields"]))
def test_every_field_has_a_row(owner: str) -> None:
    in_table = "mixed_precision_policy" if owner.startswith("MixedPrecision") else owner
    rows = {row.attribute for row in FIELDS.values() if row.owner.rpartition(".")[2] == in_table}
    assert not set(KNOWN["fields"][owner]) - rows


def test_every_flag_and_variable_has_a_row() -> None:
    assert not set(KNOWN["flags"]) - {name for name, row in FIELDS.items() if row.takes is not None}
    assert not set(KNOWN["variables"]) - {row.variable for row in FIELDS.values()}


def test_every_row_says_something() -> None:
    from paceline.config import RunSettings
    from paceline.config.settings import settings_of
    from paceline.parallel.strategy import STRATEGIES

    strategies = {each.name: each for each in STRATEGIES}
    for row in FIELDS.values():
        assert row.cases and (row.attribute or row.name in SWITCH)
        for case in row.cases:
            assert case.means or case.why, f"{row.name} {case.value}"
            for name, value in case.means.items():
                if not name.startswith("options."):
                    assert name in settings_of(RunSettings)
                    continue
                _, strategy, option = name.split(".")
                if strategy in strategies:  # and the value is one that it takes
                    given = {option: value if isinstance(value, str | int) else "2"}
                    codes = [problem.code for problem in read(strategies[strategy].Options, given, strategy)[1]]
                    assert "strategy-option" not in codes, name
                    assert not codes or not isinstance(value, str | int), name


@pytest.mark.parametrize(
    ("plugin", "owner"),
    [(FullyShardedDataParallelPlugin, ""), (ParallelismConfig, ""), (TorchTensorParallelPlugin, ""),
     (TorchTensorParallelConfig, ""), (TorchContextParallelConfig, ""), (DeepSpeedSequenceParallelConfig, ""),
     (TorchDynamoPlugin, "")],
)  # fmt: skip
def test_the_classes_have_accelerates_fields(plugin: type, owner: str) -> None:
    assert list(plugin.__dataclass_fields__) == KNOWN["fields"][plugin.__name__]


# -- plugins -------------------------------------------------------------------------------------------------


def settings(*plugins, **variables):
    given = [setting for plugin in plugins for setting in said_by(plugin)]
    if any(type(plugin).__name__ == PLUGIN for plugin in plugins):
        from paceline.config import Given

        given.append(Given("use_fsdp", "true", "code", "Accelerator(fsdp_plugin=...)"))
    return resolve_run(Overrides(plan=given), variables)


@pytest.mark.parametrize(
    ("arguments", "zero", "options"),
    [
        ({}, 3, {}),
        ({"sharding_strategy": "FULL_SHARD"}, 3, {}),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, 2, {}),
        ({"sharding_strategy": 3}, 0, {}),
        ({"reshard_after_forward": False, "fsdp_version": 2}, 3, {"reshard": "no"}),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, 2, {}),
        ({"auto_wrap_policy": "transformer_based_wrap"}, 3, {"wrap": "auto"}),
        ({"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["A", "B"]}, 3,
         {"wrap": ["A", "B"]}),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 7}, 3, {"wrap": "size", "min_params": 7}),
        ({"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=5)}, 3,
         {"wrap": "size", "min_params": 5}),
        ({"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}, 3, {"wrap": ["Linear"]}),
        ({"auto_wrap_policy": "no_wrap"}, 3, {"wrap": "none"}),
        ({"ignored_modules": r"encoder\..*"}, 3, {"ignored": ["encoder.*"]}),
        ({"forward_prefetch": True}, 3, {"prefetch": 1}),
        ({"mixed_precision_policy": "bf16"}, 3, dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), "bf16")),
        ({"mixed_precision_policy": MixedPrecision(torch.bfloat16, torch.float32)}, 3,
         {"param_dtype": "bf16", "reduce_dtype": "float32"}),
    ],
)  # fmt: skip
def test_the_plugin_becomes_a_plan(arguments, zero, options) -> None:
    resolved = settings(FullyShardedDataParallelPlugin(**arguments)).settings
    assert resolved.zero == zero
    assert dict(resolved.options.get("shard", {})) == options


def test_the_plugin_asks_for_offload_and_recomputation() -> None:
    for version, offload in ((1, True), (1, CPUOffload(offload_params=True)), (2, CPUOffloadPolicy())):
        plugin = FullyShardedDataParallelPlugin(version, cpu_offload=offload, activation_checkpointing=True)
        resolved = settings(plugin).settings
        assert (resolved.offload, resolved.recompute) == ("all", "blocks")
    assert settings(FullyShardedDataParallelPlugin(cpu_offload=False)).settings.offload == "no"


def test_each_value_names_the_field_that_said_it() -> None:
    resolved = settings(FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP", min_num_params=3,
                                                    auto_wrap_policy="SIZE_BASED_WRAP"))  # fmt: skip
    rows = {row.field: row.where for row in resolved.decisions}
    assert rows["zero"] == "FullyShardedDataParallelPlugin(sharding_strategy=...)"
    assert rows["options.shard.min_params"] == "FullyShardedDataParallelPlugin(min_num_params=...)"


def test_hybrid_sharding_has_one_copy_on_each_host() -> None:
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD")
    resolved = settings(plugin, WORLD_SIZE="8", LOCAL_WORLD_SIZE="4").settings
    assert (resolved.zero, resolved.axes["replicate"], resolved.axes["shard"]) == (3, 2, "auto")
    assert settings(plugin, GROUP_WORLD_SIZE="4").settings.axes["replicate"] == 4
    assert settings(plugin).settings.axes["replicate"] == 1


def test_what_has_no_effect_is_told_once_with_the_reason() -> None:
    resolved = settings(FullyShardedDataParallelPlugin(backward_prefetch=BackwardPrefetch.BACKWARD_POST,
                                                    cpu_ram_efficient_loading=True, sync_module_states=True,
                                                    use_orig_params=True))  # fmt: skip
    [notice] = resolved.notices
    assert "backward_prefetch" in notice and "meta device" in notice and "use_orig_params" not in notice


def test_what_cannot_be_is_refused_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        settings(FullyShardedDataParallelPlugin(activation_checkpointing_offload=True, activation_checkpointing=True,
                                                state_dict_type="LOCAL_STATE_DICT"))  # fmt: skip
    codes = [problem.code for problem in caught.value.problems]
    assert codes == ["accelerate-feature", "accelerate-feature"]
    assert all(problem.fix for problem in caught.value.problems)
    with pytest.raises(KeyError, match="HALF"):  # as there
        FullyShardedDataParallelPlugin(sharding_strategy="HALF")


def test_objects_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(CompatError) as caught:
        said_by(FullyShardedDataParallelPlugin(auto_wrap_policy=lambda *_: True, ignored_modules=[nn.Linear(1, 1)]))
    assert [problem.code for problem in caught.value.problems] == ["fsdp-object"] * 2
    assert "'Linear'" in str(caught.value)


def test_fields_left_open_are_taken_from_variables() -> None:
    with env.patched({"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", "FSDP_VERSION": "2"}):
        plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.sharding_strategy, plugin.reshard_after_forward) == (2, None, True)
    rows = {row.field: row for row in settings(plugin).decisions}
    assert (rows["zero"].value, rows["zero"].source, rows["zero"].where) == (2, "environment", "FSDP_SHARDING_STRATEGY")


def test_variables_alone_ask_for_fsdp_too() -> None:
    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "2", "FSDP_OFFLOAD_PARAMS": "true"}
    resolved = resolve_run(env=variables).settings
    assert (resolved.zero, resolved.offload) == (2, "all")
    assert resolve_run(env={**variables, "ACCELERATE_USE_FSDP": "false"}).settings.zero == "auto"


def test_sizes_of_axes() -> None:
    axes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4, tp_size=2, cp_size=1)
    resolved = settings(axes).settings
    assert [resolved.axes[axis] for axis in ("replicate", "shard", "tp", "cp")] == [2, 4, 2, 1]
    assert axes.total_size == 16
    ulysses = settings(ParallelismConfig(sp_size=2)).settings
    assert (ulysses.axes["cp"], ulysses.options) == (2, {"context": {"method": "ulysses"}})
    assert settings(TorchTensorParallelPlugin(tp_size=4)).settings.axes["tp"] == 4
    with pytest.raises(ValueError, match="mutually exclusive"):
        ParallelismConfig(sp_size=2, cp_size=2)
    with pytest.raises(ConfigError, match="groups follow"):
        settings(TorchTensorParallelPlugin(tp_size=2, torch_device_mesh=object()))


def test_dynamo() -> None:
    resolved = settings(TorchDynamoPlugin(backend="INDUCTOR", mode="max-autotune", fullgraph=True)).settings
    assert resolved.compile and resolved.options == {"compile": {"mode": "max-autotune", "fullgraph": "yes"}}
    assert not settings(TorchDynamoPlugin(backend="no", mode="max-autotune")).settings.compile
    assert not settings(TorchDynamoPlugin(backend="inductor", disable=True)).settings.compile
    assert resolve_run(env={"ACCELERATE_DYNAMO_BACKEND": "EAGER"}).settings.options == {"compile": {"backend": "EAGER"}}


def test_the_accelerator_takes_plugins() -> None:
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    )
    assert (accelerator.plan.recompute, accelerator.plan.layout.size()) == ("blocks", 1)
    assert accelerator.state.fsdp_plugin.fsdp_version == 2 and not accelerator.is_fsdp2  # one process divides nothing


def test_words_are_read_as_people_write_them() -> None:
    row = FIELDS["fsdp_offload_params"]
    assert all(fits(row.cases[0], value) for value in ("true", "Yes", "1", True, "on"))
    assert not fits(row.cases[0], "false")
