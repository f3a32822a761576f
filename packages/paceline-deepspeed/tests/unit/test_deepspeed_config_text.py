"""The text of DeepSpeed configs: blocks of the document as they stand, lines of keys, syntax errors, base64."""

import base64
import json

import pytest

from paceline.base.errors import ConfigError
from paceline_deepspeed.config import read

# The configuration blocks of the document, as they stand there; those that are parts of a block too.
WHOLE = """{
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "fp16": {
        "enabled": true
    },
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": 0.001,
            "betas": [0.9, 0.999],
            "eps": 1e-08,
            "weight_decay": 0.01
        }
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 0.001,
            "warmup_num_steps": 100
        }
    },
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": true,
        "reduce_scatter": true,
        "allgather_partitions": true
    }
}"""
PRECISION = """"fp16": {
  "enabled": true,
  "loss_scale": 0,
  "loss_scale_window": 1000,
  "hysteresis": 2,
  "min_loss_scale": 1
}
"""
HALF = '"bf16": { "enabled": true }'
CLOCK = '"wall_clock_breakdown": true,'
ACTIVATIONS = """{
  "activation_checkpointing": {
    "profile": true
  }
}"""
FLOPS = """{
  "flops_profiler": {
    "enabled": true,
    "profile_step": 1,
    "module_depth": -1,
    "top_modules": 3,
    "detailed": true,
    }
}"""
MONITORS = """{
  "tensorboard": {
    "enabled": true,
    "output_path": "output/ds_logs/",
    "job_name": "train_bert"
  }
  "wandb": {
    "enabled": true,
    "team": "my_team",
    "group": "my_group",
    "project": "my_project"
  }
  "csv_monitor": {
    "enabled": true,
    "output_path": "output/ds_logs/",
    "job_name": "train_bert"
  }
}"""
COMMS = """{
  "comms_logger": {
    "enabled": true,
    "verbose": false,
    "prof_all": true,
    "debug": false
  }
"""
TUNING = """{
  "autotuning": {
    "enabled": true,
    "results_dir": null,
    "exps_dir": null,
    "overwrite": false,
    "metric": "throughput",
    "num_nodes": null,
    "num_gpus": null,
    "start_profile_step": 3,
    "end_profile_step": 5,
    "fast": true,
    "num_tuning_micro_batch_sizes": 3,
    "tuner_type": "model_based",
    "tuner_early_stopping": 5,
    "tuner_num_trials": 50,
    "arg_mappings": null
  }
}"""


@pytest.fixture
def read_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def of(text):
        (tmp_path / "ds.json").write_text(text, encoding="utf-8")
        return read("ds.json")

    return of


def test_the_whole_config_of_the_document(read_text):
    parsed = read_text(WHOLE)
    assert {setting.name: (setting.value, setting.where) for setting in parsed.given} == {
        "mixed_precision": ("fp16", "ds.json:5"),
        "zero": (2, "ds.json:25"),
    }
    assert parsed["optimizer.params"] == {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    assert parsed["scheduler.params"]["warmup_num_steps"] == 100
    assert not parsed.notices and parsed["gradient_clipping"] == 1.0 and "gradient_clipping" not in parsed.places
    assert (str(parsed.batch(2)), str(parsed.batch(1))) == ("32 = 8 x 2 x 2", "32 = 16 x 2 x 1")


@pytest.mark.parametrize(
    ("text", "name", "value", "line"),
    [
        (PRECISION, "fp16.loss_scale_window", 1000, 4),
        (HALF, "bf16.enabled", True, 1),
        (f"{PRECISION.replace('true', 'false')}{HALF}", "bf16.enabled", True, 8),
        (CLOCK, "wall_clock_breakdown", True, 1),
        (ACTIVATIONS, "activation_checkpointing.profile", True, 3),
        (FLOPS, "flops_profiler.top_modules", 3, 6),
        (MONITORS, "wandb.team", "my_team", 9),
        (MONITORS, "csv_monitor.output_path", "output/ds_logs/", 15),
        (COMMS + "}", "comms_logger.verbose", False, 4),
        (TUNING, "autotuning.tuner_type", "model_based", 14),
        (TUNING, "autotuning.results_dir", "autotuning_results", 4),
        (
            "# a comment: 5\n{ // another\n train_batch_size: 8 /* fp16:\n */\n\n bf16: {enabled: true} }",
            "bf16.enabled",
            True,
            6,
        ),
        ('{"csv_monitor": {"job_name": "enabled: \\"no\\"",\n "enabled": true}}', "csv_monitor.enabled", True, 2),
    ],
)
def test_blocks_as_people_write_them(read_text, text, name, value, line):
    parsed = read_text(text)
    assert (parsed[name], parsed.places[name]) == (value, f"ds.json:{line}")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (COMMS, "ds.json:8:1"),
        ('{"a": 1,\n "b": [1, 2}', "ds.json:2:"),
        ("[1, 2]", "ds.json:1:1"),
        ("12", "ds.json:1:1"),
        ('{"train_batch_size": 8,\n "fp16": {"enabled" true}}', "ds.json:2:"),
        ("{" * 3000, "ds.json:1:"),
        ("", "ds.json:1:1"),
        ("# nothing yet", "ds.json:1:1"),
    ],
)
def test_what_is_no_json_names_line_and_column(read_text, text, where):
    with pytest.raises(ConfigError, match=r"not JSON|block of keys") as error:
        read_text(text)
    assert error.value.code == "config-syntax" and where in str(error.value)


def test_base64_and_what_is_neither(read_text):
    encoded = base64.urlsafe_b64encode(json.dumps({"bf16": {"enabled": True}}).encode()).decode()
    assert read(encoded)["bf16.enabled"] and read(encoded).places["bf16.enabled"] == "config (base64):1"
    with pytest.raises(ConfigError, match="no such file") as error:
        read("missing.json")
    assert error.value.code == "config-file" and "base64" not in str(error.value)
    with pytest.raises(ConfigError, match="no base64 of JSON either"):
        read("no file and no base64")


def test_dotted_names_beside_the_blocks_are_not_read():
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 3},
        "zero_optimization.stage3_prefetch_bucket_size": 921.6,
    }
    assert read(config)["zero_optimization.stage3_prefetch_bucket_size"] == 50_000_000


def test_a_block_that_is_not_closed_is_named_so(read_text):
    with pytest.raises(ConfigError, match="a `}` or `]` is missing") as error:
        read_text('{"comms_logger": {\n "enabled": true\n}')
    assert "(eof)" not in str(error.value)


def test_a_key_that_stands_twice(read_text):
    text = """{"train_batch_size": 8,
 "fp16": {"enabled": true},
 "fp16": {"enabled": true},
 "bfloat16": {},
 "train_batch_size": 9}"""
    with pytest.raises(ConfigError) as error:
        read_text(text)
    assert [problem.code for problem in error.value.problems] == ["config-twice"] * 2
    assert "ds.json:3 sets fp16.enabled a second time" in str(error.value) and "first: ds.json:1" in str(error.value)
