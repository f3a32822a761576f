"""accelerate's words for DeepSpeed: the block of its files, and the fields of its plugin."""

import pytest

from paceline.base.errors import ConfigError
from paceline.config import Given, resolve_launch
from paceline_accelerate.deepspeed_plugin import DeepSpeedPlugin

FILE = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""


def told(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return resolve_launch([Given("config", str(path), "command line", "--config")], {})


def test_a_file_of_accelerates_that_asks_for_deepspeed(tmp_path):
    found = told(tmp_path, FILE)
    assert (found.run.zero, found.run.offload, found.run.accumulate, found.run.mixed_precision) == (
        2,
        "optimizer",
        4,
        "bf16",
    )
    where = {row.field: row.where.rpartition(":")[2] for row in found.decisions}
    assert (where["zero"], where["offload"], where["accumulate"]) == ("8", "5", "3")
    assert {"gradient_clipping", "zero3_init_flag"} <= {row.field for row in found.unused}


def test_the_usual_launcher_of_a_file_needs_no_notice(tmp_path):
    text = FILE.replace("deepspeed_config:\n", "deepspeed_config:\n  deepspeed_multinode_launcher: standard\n")
    assert not told(tmp_path, text).notices
    [notice] = told(tmp_path, text.replace("standard", "pdsh")).notices
    assert "deepspeed_multinode_launcher" in notice


def test_the_command_line_is_stronger_than_the_block_of_a_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    flags = [
        Given("config", str(path), "command line", "--config"),
        Given("accumulate", 3, "command line", "--gradient_accumulation_steps"),
    ]
    launch = resolve_launch(flags, {})
    assert (launch.run.zero, launch.run.accumulate) == (2, 3)
    assert launch.hand_over()["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "3"
    launch = resolve_launch([*flags, Given("zero_stage", "1", "command line", "--zero_stage")], {})
    assert launch.run.zero == 1 and launch.hand_over()["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "1"
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in resolve_launch(flags[1:], {}, search=False).hand_over()


@pytest.mark.parametrize(
    ("name", "value", "setting", "expected", "variable"),
    [
        ("offload_param_device", "cpu", "offload", "all", "DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
        ("offload_optimizer_device", "none", "offload", "no", "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"),
        ("zero3_save_16bit_model", "true", "zero", 3, "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),
        ("gradient_clipping", "0.5", "zero", 3, "GRADIENT_CLIPPING"),
        ("use_deepspeed", "true", "zero", 3, "USE_DEEPSPEED"),
    ],
)
def test_a_flag_replaces_one_field_of_the_block_of_a_file(tmp_path, name, value, setting, expected, variable):
    path = tmp_path / "run.yaml"
    path.write_text(FILE.replace("zero_stage: 2", "zero_stage: 3"))
    flags = [Given("config", str(path), "command line", "--config"), Given(name, value, "command line", f"--{name}")]
    launch = resolve_launch(flags, {})
    assert getattr(launch.run, setting) == expected and launch.run.zero == 3
    assert launch.hand_over()[f"ACCELERATE_{variable}"].lower() == value
    assert launch.hand_over()["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    sources = {row.field: row.source for row in launch.decisions}
    assert (sources["zero"], sources["accumulate"]) == ("file", "file")
    if expected == "all":
        assert sources["offload"] == "command line"


def test_a_file_that_names_a_config(tmp_path):
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 3},\n "gradient_accumulation_steps": "auto"}')
    text = FILE.replace("  zero_stage: 2\n", f"  deepspeed_config_file: {config}\n")
    found = told(tmp_path, text)
    assert (found.run.zero, found.run.accumulate) == (3, 4)
    assert {row.field: row.where for row in found.decisions}["zero"] == f"{config}:1"


def test_a_config_whose_scheduler_is_known_later(tmp_path):
    config = tmp_path / "ds.json"
    scheduler = '{"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}'
    config.write_text(f'{{"zero_optimization": {{"stage": 1}}, "train_batch_size": "auto", "scheduler": {scheduler}}}')
    flags = [Given("deepspeed_config_file", str(config), "command line", "--deepspeed_config_file")]
    launch = resolve_launch(flags, {}, search=False)
    assert launch.run.zero == 1 and launch.hand_over()["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(config)


def test_without_a_stage_it_is_the_second(tmp_path):
    assert told(tmp_path, "distributed_type: DEEPSPEED\n").run.zero == 2


def test_a_name_that_there_is_not(tmp_path):
    with pytest.raises(ConfigError, match="'zero_stage'"):
        told(tmp_path, FILE.replace("zero_stage", "zero_stagee"))


def test_the_block_does_not_count_elsewhere(tmp_path):
    assert told(tmp_path, FILE.replace("DEEPSPEED", "MULTI_GPU")).run.zero == "auto"


def test_the_plugin():
    said = DeepSpeedPlugin(zero_stage=3, offload_param_device="cpu", gradient_accumulation_steps=2).said()
    assert {each.name: (each.value, each.where) for each in said} == {
        "zero": (3, "DeepSpeedPlugin(zero_stage=...)"), "offload": ("all", "DeepSpeedPlugin(offload_param_device=...)"),
        "accumulate": (2, "DeepSpeedPlugin(gradient_accumulation_steps=...)"),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="give nvme_path a folder"):
        DeepSpeedPlugin(zero_stage=3, offload_param_device="nvme").said()
    said = DeepSpeedPlugin(zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/nvme").said()
    assert {each.name: each.value for each in said}["offload"] == "all=disk:/nvme"
    said = DeepSpeedPlugin(zero_stage=1, offload_optimizer_device="nvme", offload_optimizer_nvme_path="/nvme").said()
    assert {each.name: each.value for each in said}["offload"] == "optimizer=disk:/nvme"


def test_the_launcher_hands_on_what_the_plugin_reads(tmp_path):
    variables = told(tmp_path, FILE).hand_over()
    expected = {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "2", "GRADIENT_CLIPPING": "1.0",
                "GRADIENT_ACCUMULATION_STEPS": "4", "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
                "DEEPSPEED_ZERO3_INIT": "false", "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"}  # fmt: skip
    found = {
        name.removeprefix("ACCELERATE_"): value for name, value in variables.items() if name.startswith("ACCELERATE")
    }
    assert found == expected
    flags = [Given("zero_stage", "3", "command line", "--zero_stage")]
    launch = resolve_launch(flags, {}, search=False)
    assert launch.hand_over()["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3" and not launch.notices


def test_the_plugin_with_a_config_fills_in_what_is_auto():
    config = {"zero_optimization": {"stage": "auto"}, "gradient_accumulation_steps": "auto", "bf16": {"enabled": True}}
    said = DeepSpeedPlugin(hf_ds_config=config, zero_stage=1, gradient_accumulation_steps=8).said()
    assert {each.name: each.value for each in said} == {"zero": 1, "accumulate": 8, "mixed_precision": "bf16"}


@pytest.mark.parametrize("name", ["7", "true"])
def test_a_config_file_whose_name_reads_as_a_value(name):
    flags = [Given("deepspeed_config_file", name, "command line", "--deepspeed_config_file")]
    with pytest.raises(ConfigError) as caught:
        resolve_launch(flags, {}, search=False)
    assert caught.value.code == "config-file"
