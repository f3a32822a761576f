"""accelerate's files and flags for FSDP, axes and dynamo are read as plans."""

import pytest

from paceline.base.errors import ConfigError
from paceline.config import Given, resolve_launch
from paceline_accelerate.kinds import DistributedType

FSDP = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: GPT2Block,LlamaDecoderLayer
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_cp_comm_strategy: allgather
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""


def told(tmp_path, text, *flags):
    path = tmp_path / "fsdp.yaml"
    path.write_text(text)
    return resolve_launch([Given("config", str(path), "command line", "--config"), *flags], {})


def flag(name, value="true"):
    return Given(name, value, "command line", f"--{name}")


def test_a_file_of_accelerates_with_everything(tmp_path):
    found = told(tmp_path, FSDP)
    assert (found.launch.procs, found.run.mixed_precision, found.run.zero) == (8, "bf16", 3)
    assert (found.run.axes["replicate"], found.run.axes["shard"], found.run.axes["tp"], found.run.axes["cp"]) == (
        2,
        2,
        2,
        1,
    )
    assert found.run.recompute == "blocks"
    assert found.run.options["shard"] == {"reshard": "no", "wrap": "GPT2Block,LlamaDecoderLayer"}
    where = {row.field: row.where.rpartition(":")[2] for row in found.decisions}
    assert (where["zero"], where["options.shard.wrap"], where["tp"]) == ("11", "13", "25")
    [notice] = found.notices
    assert "fsdp_cpu_ram_efficient_loading" in notice and "fsdp.yaml:9" in notice
    assert "fsdp_version" not in notice and "fsdp_version" in {row.field for row in found.unused}


@pytest.mark.parametrize(
    ("word", "zero", "replicate"),
    [("FULL_SHARD", 3, "auto"), ("1", 3, "auto"), ("SHARD_GRAD_OP", 2, "auto"), ("NO_SHARD", 0, "auto"),
     ("HYBRID_SHARD", 3, 2), ("hybrid_shard_zero2", 2, 2)],
)  # fmt: skip
def test_words_for_sharding(tmp_path, word, zero, replicate):
    text = f"distributed_type: FSDP\nnum_machines: 2\nmain_process_ip: a\nfsdp_config:\n  sharding_strategy: {word}\n"
    found = told(tmp_path, text).run
    assert (found.zero, found.axes["replicate"]) == (zero, replicate)


def test_copies_for_each_node_need_a_fixed_number_of_nodes(tmp_path):
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n"
    with pytest.raises(ConfigError) as caught:
        told(tmp_path, text, flag("nodes", "1:3"))
    assert caught.value.code == "accelerate-feature"
    assert "HYBRID_SHARD" in str(caught.value) and "number of nodes may change" in str(caught.value)


def test_flags_say_the_same_and_win_over_the_file(tmp_path):
    found = told(tmp_path, "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n",
                 flag("fsdp_sharding_strategy", "SHARD_GRAD_OP"), flag("fsdp_offload_params"))  # fmt: skip
    assert (found.run.zero, found.run.offload) == (2, "all")
    assert told(tmp_path, "", flag("use_fsdp")).run.zero == 3
    assert told(tmp_path, "fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n", flag("use_fsdp")).run.zero == 2


def test_without_fsdp_its_block_counts_for_nothing(tmp_path):
    found = told(tmp_path, "distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n")
    assert found.run.zero == "auto"
    assert "use_fsdp" in next(row for row in found.unused if row.field == "fsdp_sharding_strategy").reason


def test_sizes_of_one_leave_the_axes_open(tmp_path):
    text = "parallelism_config:\n  dp_shard_size: 1\n  tp_size: 1\n  sp_size: 2\n"
    found = told(tmp_path, text).run
    sizes = (found.axes["shard"], found.axes["tp"], found.axes["cp"])
    assert (sizes, found.options) == (("auto", 1, 2), {"context": {"method": "ulysses"}})


def test_dynamo(tmp_path):
    text = "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: max-autotune\n  dynamo_use_fullgraph: true\n"
    found = told(tmp_path, text).run
    assert found.compile and found.options == {"compile": {"mode": "max-autotune", "fullgraph": "yes"}}
    off = told(tmp_path, "dynamo_backend: 'NO'\ndynamo_mode: max-autotune\n")
    assert not off.run.compile and not off.run.options


def test_values_that_are_none_and_features_that_are_missing_are_told_at_once(tmp_path):
    text = """\
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: HALF_SHARD
  fsdp_activation_checkpointing_offload: true
  fsdp_shardin: 1
parallelism_config:
  sp_size: 2
  cp_size: 2
  sp_attn_implementation: flash_attention_2
"""
    with pytest.raises(ConfigError) as caught:
        told(tmp_path, text)
    assert sorted(problem.code for problem in caught.value.problems) == ["accelerate-feature"] * 4 + ["config-value"]
    assert "FULL_SHARD, 1" in str(caught.value) and "fsdp.yaml:4" in str(caught.value)
    assert all(problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize("kind", [kind.value for kind in DistributedType if kind.value.startswith("MULTI_")])
def test_several_processes_on_any_device(tmp_path, kind):
    assert told(tmp_path, f"distributed_type: {kind}\nnum_processes: 2\n").launch.procs == 2


def test_keys_of_older_files(tmp_path):
    assert told(tmp_path, "distributed_type: MULTI_GPU\nfp16: true\nnum_processes: '2'\n").run.mixed_precision == "fp16"
    assert told(tmp_path, "fp16: true\nmixed_precision: bf16\n").run.mixed_precision == "bf16"
    found = told(tmp_path, "fp16: false\nipex_config:\n  ipex: true\ndynamo_backend: 'NO'\ndowncast_bf16: 'no'\n")
    assert (found.run.mixed_precision, found.run.compile) == ("no", False)
    assert {row.field for row in found.unused} >= {"fp16", "ipex_config"}
