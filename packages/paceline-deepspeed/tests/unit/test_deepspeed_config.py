"""DeepSpeed's keys: each row of the table, values, "auto", settings of ours, and everything that is refused."""

import contextlib
import json
import pickle
from types import SimpleNamespace

import pytest
from torch import nn

from paceline.base.errors import ConfigError
from paceline.config.options import NAME as OPTIONS
from paceline.config.overrides import Overrides
from paceline.config.settings import RunSettings, settings_of
from paceline.config.sources import resolve_run
from paceline_deepspeed.arguments import sizes_for_auto
from paceline_deepspeed.config import read
from paceline_deepspeed.config.keys import blocks, by_name, rows
from paceline_deepspeed.config.parts import PARTS
from paceline_deepspeed.config.row import Staged
from paceline_deepspeed.width import data_ranks


def nested(**keys):
    """`zero_optimization__stage=2` as the dict that a script writes."""
    config = {}
    for name, value in keys.items():
        *above, last = name.split("__")
        block = config
        for key in above:
            block = block.setdefault(key, {})
        block[last] = value
    return config


def given(config, **more):
    return {setting.name: setting.value for setting in read(config, **more).given}


def problems(config, **more):
    with pytest.raises(ConfigError) as error:
        read(config, **more)
    return error.value.problems


# -- the table -----------------------------------------------------------------------------------------------------


ROWS = [row for row in rows() if row.name.partition(".")[0] not in PARTS]  # those have tests of their own


def sample(row, text):
    """A value for a case: its first word, or one that is not the default."""
    word = text.split("|")[0]
    if word != "*":
        return word
    of_other_cases = {word for case in row.cases for word in case.value.split("|")}
    words = row.kind.expected.replace(" or ", ", ").split(", ")
    for value in (*words, 3, 5, [1, 2], {"a": 1}, 0.5, "x"):
        with contextlib.suppress(ValueError):
            if row.kind.read(value) != row.default and str(value) not in of_other_cases:
                return value
    raise AssertionError(f"no value for {row.name}")


def config_for(row, case):
    keys = {row.name: sample(row, case.value)}
    if isinstance(case, Staged):
        keys.setdefault("zero_optimization.stage", int(case.stages[0]))
    if row.needs:
        keys.setdefault("zero_optimization.stage", 2)
        needed, _, value = row.needs.partition("=")
        keys[needed] = value
        if value == "nvme":
            keys[f"{needed.rpartition('.')[0]}.nvme_path"] = "disk"
    switch = f"{row.name.rpartition('.')[0]}.enabled"
    if switch in by_name():
        keys.setdefault(switch, True)
    return nested(**{name.replace(".", "__"): value for name, value in keys.items()})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row(row):
    for case in row.cases:
        config = config_for(row, case)
        if case.fix:
            assert ("deepspeed-feature", case.fix) in [(problem.code, problem.fix) for problem in problems(config)]
        elif case.means:
            assert set(case.means) <= {setting.name for setting in read(config).given}
        else:
            assert f"no effect here: {case.why}" in {
                unused.reason for unused in read(config).unused if unused.field == row.name
            }
    if not row.cases:
        parsed = read(config_for(row, Staged("*")))
        assert parsed.places[row.name] and row.name not in {unused.field for unused in parsed.unused}
        assert row.doc and row.name in read({}).values


def test_the_table_itself():
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names) == len(read({}).values)
    assert not set(names) & blocks()
    settings = settings_of(RunSettings)
    for row in rows():
        assert row.doc or row.cases, row.name
        for case in row.cases:
            assert bool(case.means) != bool(case.why), row.name
            assert all(name in settings or name.startswith(f"{OPTIONS}.") for name in case.means), row.name


def test_what_it_means_can_be_merged_and_keeps_its_place():
    config = nested(
        zero_optimization__stage=3, zero_optimization__offload_param__device="cpu", bf16__enabled="true",
        wall_clock_breakdown=True, comms_logger__enabled=True, communication_data_type="fp32",
    )  # fmt: skip
    resolved = resolve_run(Overrides(plan=list(read(config).given)), {})
    assert (resolved.settings.zero, resolved.settings.offload, resolved.settings.mixed_precision) == (3, "all", "bf16")
    assert resolved.settings.profile == "wall-clock,comms" and resolved.settings.options == {
        "shard": {"reduce_dtype": "float32"}
    }
    [row] = [decision for decision in resolved.decisions if decision.field == "zero"]
    assert row.where == "deepspeed.initialize(config={'zero_optimization': {'stage': ...}})"


def test_defaults_say_nothing():
    parsed = read({})
    assert not parsed.given and not parsed.unused and not parsed.notices
    assert (
        parsed["gradient_clipping"] == 1.0
        and parsed["fp16.hysteresis"] == 2
        and parsed["comms_logger.prof_all"] is True
    )
    assert parsed["zero_optimization.reduce_bucket_size"] == 500_000_000


def test_stages_and_buckets():
    size = {"reduce_bucket_size": 5e6, "allgather_bucket_size": 2_097_152}
    assert given({"zero_optimization": True}) == {"zero": 1}
    assert given({"zero_optimization": {"stage": 1, **size}}) == {
        "zero": 1, "options.replicate.bucket_cap_mb": 19.073, "options.zero.bucket_cap_mb": 8.0,
    }  # fmt: skip
    assert given({"zero_optimization": {"stage": 2, **size}}) == {"zero": 2, "options.zero.bucket_cap_mb": 8.0}
    assert given({"zero_optimization": {"stage": 3, **size}}) == {"zero": 3}
    both = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    assert given({"zero_optimization": both}) == {"zero": 3, "offload": "all"}
    assert given({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}) == {"zero": 0}
    on_disk = {"device": "nvme", "nvme_path": "/local/nvme", "pipeline_read": True}
    assert (
        given({"zero_optimization": {"stage": 3, "offload_optimizer": on_disk}})["offload"]
        == "optimizer=disk:/local/nvme"
    )
    assert given({"zero_optimization": {"stage": 0, "offload_optimizer": on_disk}}) == {"zero": 0}
    small_parts = {"stage": 2, "offload_optimizer": on_disk, "sub_group_size": 2**22}
    assert given({"zero_optimization": small_parts})["options.offload.part_mb"] == 16.0
    parameters = {"device": "nvme", "nvme_path": "/local/other", "max_in_cpu": 0}
    for states, expected in (
        ({"device": "none"}, "all=disk:/local/other"), ({"device": "cpu"}, "all=disk:/local/other"),
        (on_disk, "all=disk:/local/other"),
    ):  # fmt: skip
        both = {"stage": 3, "offload_optimizer": states, "offload_param": parameters}
        assert given({"zero_optimization": both}) == {"zero": 3, "offload": expected}
    both = {"stage": 3, "offload_optimizer": on_disk, "offload_param": {"device": "cpu"}}
    assert given({"zero_optimization": both})["offload"] == "all=disk:/local/nvme"
    assert given({"zero_optimization": {"stage": 2, "offload_param": parameters}}) == {"zero": 2}


def test_profiles_carry_their_options():
    flops = {"enabled": True, "profile_step": 1, "top_modules": 3, "detailed": False, "output_file": "flops.txt"}
    assert given({"flops_profiler": flops, "comms_logger": {"enabled": False, "verbose": True}, "memory_breakdown": 1}) == {
        "profile": "memory,flops", "options.profile.flops_step": 2, "options.profile.flops_top": 3,
        "options.profile.flops_detailed": False, "options.profile.flops_file": "flops.txt",
    }  # fmt: skip
    some = {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce", "broadcast"], "verbose": True}
    assert given({"comms_logger": some, "wall_clock_breakdown": True}) == {
        "profile": "wall-clock,comms", "options.profile.comms_ops": "all_reduce,broadcast",
        "options.profile.comms_verbose": True,
    }  # fmt: skip
    assert "options.profile.comms_ops" not in given({"comms_logger": {**some, "prof_all": True}})


def test_a_notice_tells_what_was_asked_for_in_vain():
    zero = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "offload_param": {"device": "none"}}
    [notice] = read({"zero_optimization": zero, "comms_logger": {"enabled": False, "debug": True}}).notices
    assert "zero_optimization.overlap_comm (deepspeed.initialize(config=" in notice
    assert all(name not in notice for name in ("contiguous_gradients", "offload_param", "comms_logger"))


def test_there_is_no_notice_of_sizes_that_transformers_writes_in_place_of_auto():
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(hidden_size=32)
    usual = sizes_for_auto(model)
    zero = {name.rpartition(".")[2]: value for name, value in usual.items()}
    assert zero["stage3_prefetch_bucket_size"] == 921
    assert read({"zero_optimization": {"stage": 3, **zero}}).notices and sizes_for_auto(nn.Linear(1, 1)) == {}
    assert not read({"zero_optimization": {"stage": 3, **zero}}).notices_beside(usual)
    [notice] = read({"zero_optimization": {"stage": 3, **zero, "reduce_bucket_size": 5}}).notices_beside(usual)
    assert "reduce_bucket_size" in notice and "stage3_prefetch_bucket_size" not in notice


# -- values --------------------------------------------------------------------------------------------------------


def test_numbers_and_words_may_be_text():
    config = nested(
        train_batch_size="8", gradient_clipping="1e-1", fp16__enabled="True", fp16__min_loss_scale=1e-10,
        zero_optimization__stage="2", zero_optimization__sub_group_size="1e9", checkpoint__tag_validation="fail",
        communication_data_type="torch.bfloat16", steps_per_print=2.0,
    )  # fmt: skip
    parsed = read(config)
    assert (parsed["train_batch_size"], parsed["gradient_clipping"], parsed["fp16.min_loss_scale"]) == (8, 0.1, 1e-10)
    assert (parsed["zero_optimization.stage"], parsed["zero_optimization.sub_group_size"]) == (2, 10**9)
    assert (parsed["checkpoint.tag_validation"], parsed["communication_data_type"]) == ("FAIL", "bf16")
    assert parsed["steps_per_print"] == 2 and isinstance(parsed["steps_per_print"], int)


def test_null_is_the_default():
    parsed = read({"autotuning": {"results_dir": None, "tuner_type": None}, "fp16": None, "optimizer": None})
    assert (parsed["autotuning.results_dir"], parsed["autotuning.tuner_type"]) == ("autotuning_results", "gridsearch")


def test_old_names():
    parsed = read(
        {"bfloat16": {"enabled": True}, "zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}}
    )
    assert parsed["bf16.enabled"] and parsed["zero_optimization.stage3_gather_16bit_weights_on_model_save"]


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"train_batchsize": 8}, "config-key", "'train_batch_size'"),
        ({"fp16": {"enable": True}}, "config-key", "no key 'enable' in fp16"),
        ({"hysteresis": 2}, "config-key", "it is fp16.hysteresis"),
        ({"zero_optimization": {"offload_optimizer": {"devcie": "cpu"}}}, "config-key", "'device'"),
        ({"zero_optimization": {"offload_param.device": "cpu"}}, "config-key", '{"offload_param": {"device": ...}}'),
        ({"zero_optimization": {"stage": 4}}, "config-value", "expected: 0, 1, 2 or 3"),
        ({"fp16": True}, "config-value", "fp16 cannot be True"),
        ({"train_batch_size": 0}, "config-value", "at least 1"),
        ({"train_batch_size": True}, "config-value", "train_batch_size cannot be True"),
        ({"train_batch_size": {"a": 1}}, "config-value", "cannot be a block of keys"),
        ({"gradient_clipping": float("nan")}, "config-value", "gradient_clipping cannot be nan"),
        ({"fp16": {"loss_scale_window": 0}}, "config-value", "fp16.loss_scale_window"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 1.5}}}, "config-value", "at most 1"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "cpuadam_cores_perc": 80}}},
         "config-value", "at most 1"),
        ({"communication_data_type": "int8"}, "config-value", "fp32, fp16 or bf16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "deepspeed-conflict", "{'bf16': {'enabled': ...}}"),
        ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
         "deepspeed-conflict", 'torch_autocast.dtype = "bf16"'),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
         "deepspeed-conflict", "keep offload_optimizer"),
        ({"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}, "deepspeed-conflict", "stage = 3"),
        ({"zero_optimization": {"stage": "all"}}, "deepspeed-conflict", "autotuning.enabled = False (the default)"),
        ({"autotuning": {"start_profile_step": 9}}, "deepspeed-conflict", "end_profile_step = 5"),
        ({"gradient_allreduce_op": "sum"}, "deepspeed-feature", "multiply the loss"),
        ({"amp": {"enabled": True}}, "deepspeed-feature", "bf16"),
        ({"sparse_gradients": True}, "deepspeed-feature", "sparse_gradients is not supported"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "deepspeed-conflict", "give nvme_path"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}, "deepspeed-conflict", "give nvme_path"),
    ],
)  # fmt: skip
def test_what_is_refused(config, code, words):
    [problem] = problems(config)
    assert problem.code == code and words in str(problem)


def test_autocast_beside_a_half_precision_of_the_same_dtype_is_one_precision():
    for dtype, half in (("bfloat16", "bf16"), ("float16", "fp16")):
        config = read({half: {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": dtype}})
        assert {given.value for given in config.given if given.name == "mixed_precision"} == {half}


def test_a_key_of_the_scripts_own_beside_deepspeeds_is_told_and_not_refused():
    config = read({"train_batch_size": 4, "cuda_visible_devices": 0, "my_run": {"name": "a"}})
    assert [row.field for row in config.unused] == ["cuda_visible_devices", "my_run"]
    assert "cuda_visible_devices" in config.notices[0] and "my_run" in config.notices[0]


@pytest.mark.parametrize("block", ["activation_checkpointing", "checkpoint", "flops_profiler", "pipeline"])
def test_so_is_one_in_a_block_of_which_deepspeed_reads_single_keys(block):
    config = read({"train_batch_size": 4, block: {"zebra": 1}})
    assert [row.field for row in config.unused] == ["zebra"]
    with pytest.raises(ConfigError, match="zebra"):
        read({"train_batch_size": 4, "fp16": {"zebra": 1}})


@pytest.mark.parametrize("config", [{"compile": {"deepcompile": False}}, {"weight_quantization": {}}])
def test_a_block_in_which_nothing_is_on_is_off(config):
    read({"train_batch_size": 4, **config})


def test_features_that_are_off_ask_for_nothing():
    read(
        {
            "amp": {"enabled": False},
            "elasticity": {"enabled": False, "max_train_batch_size": 5},
            "sparse_gradients": False,
        }
    )


def test_dotted_keys_of_a_dict_are_ignored_as_in_deepspeed_and_refused_in_a_file(tmp_path):
    # trl's `prepare_deepspeed` adds such keys to the dict of a model that is not trained.
    dotted = {"zero_optimization.stage": 0, "zero_optimization.stage3_prefetch_bucket_size": 921.6}
    parsed = read({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1000}, **dotted})
    assert (parsed["zero_optimization.stage"], parsed["zero_optimization.stage3_prefetch_bucket_size"]) == (3, 1000)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(dotted))
    assert [problem.code for problem in problems(path)] == ["config-key", "config-key"]


def test_all_problems_at_once():
    reported = problems(
        {
            "train_batchsize": 1,
            "fp16": {"enabled": True, "b": 2},
            "bf16": {"enabled": 1},
            "amp": True,
            "train_batch_size": -1,
        }
    )
    assert [problem.code for problem in reported] == [
        "config-key", "config-key", "config-value", "deepspeed-conflict", "deepspeed-feature",
    ]  # fmt: skip


# -- "auto" --------------------------------------------------------------------------------------------------------

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"}},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": "auto"},
}


def test_auto_from_hints():
    hints = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "learning_rate": 2e-5,
        "adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6, "weight_decay": 0.1, "max_steps": 100, "bf16": True,
        "zero_optimization.reduce_bucket_size": 1_048_576,
    }  # fmt: skip
    parsed = read(AUTO, hints=hints)
    assert str(parsed.batch(2)) == "16 = 4 x 2 x 2" and parsed["gradient_clipping"] == 0.5
    assert parsed["optimizer.params"] == {"lr": 2e-5, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    assert parsed["scheduler.params"] == {"warmup_max_lr": 2e-5, "total_num_steps": 100}
    assert given(AUTO, hints=hints)["options.zero.bucket_cap_mb"] == 4.0


def test_auto_without_hints_is_the_default_or_an_error():
    [problem] = problems(AUTO)
    assert problem.code == "deepspeed-auto" and "scheduler.params.total_num_steps" in problem.what
    rest = {**AUTO, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    parsed = read(rest)
    assert parsed["optimizer.params"] == {} and parsed["gradient_clipping"] == 1.0 and not parsed["bf16.enabled"]
    with pytest.raises(ConfigError, match="train_batch_size is auto") as error:
        parsed.batch(1)
    assert error.value.code == "deepspeed-batch"
    assert problems({"optimizer": {"type": "auto"}})[0].code == "deepspeed-auto"


def test_an_optimizer_that_needs_a_closure_is_refused():
    (problem,) = problems({"train_batch_size": 4, "optimizer": {"type": "LBFGS", "params": {"lr": 0.1}}})
    assert problem.code == "deepspeed-feature" and "closure" in problem.why and problem.fix.startswith("use AdamW")


# -- the batch triangle --------------------------------------------------------------------------------------------


def triangle(train, micro, steps, width):
    numbers = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    return read({name: value for name, value in numbers.items() if value is not None}).batch(width)


@pytest.mark.parametrize(
    ("asked", "closed"),
    [
        ((16, 4, 2, 2), "16 = 4 x 2 x 2"),
        ((16, 4, None, 2), "16 = 4 x 2 x 2"),
        ((16, None, 2, 2), "16 = 4 x 2 x 2"),
        ((None, 4, 2, 2), "16 = 4 x 2 x 2"),
        ((16, None, None, 2), "16 = 8 x 1 x 2"),
        ((None, 4, None, 2), "8 = 4 x 1 x 2"),
    ],
)
def test_any_two_close_the_triangle(asked, closed):
    assert str(triangle(*asked)) == closed


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((7, None, None, 2), ["7 is not 3 x 1 x 2", "2 ranks read", "train_batch_size 6", "train_batch_size 8"]),
        ((16, 4, 3, 2), ["16 is not 4 x 3 x 2", "{'gradient_accumulation_steps': ...}", "train_batch_size 16"]),
        ((16, 5, None, 2), ["16 is not 5 x 1 x 2", "train_batch_size 20"]),
        ((1, 4, None, 4), ["1 is not 4 x 0 x 4", "train_batch_size 16"]),
        ((64, 4, 2, 1), ["one process alone: was the script not started by a launcher?"]),
        ((None, None, 4, 2), ["neither", "gradient_accumulation_steps = 4"]),
        ((None, None, None, 2), ["neither train_batch_size nor train_micro_batch_size_per_gpu is given"]),
    ],
)
def test_a_triangle_that_does_not_close(asked, words):
    with pytest.raises(AssertionError) as error:
        triangle(*asked)
    assert isinstance(error.value, ConfigError) and error.value.code == "deepspeed-batch"
    assert all(word in str(error.value) for word in words), str(error.value)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


# -- optimizers and schedulers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "code", "words"),
    [
        ({"optimizer": {"type": "adam", "params": {"lrr": 1}}}, "config-key", "Adam has no parameter 'lrr'"),
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "config-value", "list of two numbers"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "deepspeed-feature", "gradient_clipping"),
        ({"optimizer": {"type": "Adamm"}}, "config-value", "write 'Adam'"),
        ({"optimizer": {"type": "OneBitAdam"}}, "deepspeed-feature", "use Adam"),
        ({"optimizer": {"params": {"lr": 1}}}, "config-value", "without a type"),
        ({"scheduler": {"type": "warmuplr"}}, "config-value", "write 'WarmupLR'"),
        ({"optimizer": {"type": "rmsprop"}}, "config-value", "write 'RMSprop'"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}}, "config-key", "'warmup_num_steps'"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "config-value", "lacks total_num_steps"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "config-value", "at least 1"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}, "config-value", "log or linear"),
    ],
)
def test_parts_that_are_wrong(part, code, words):
    [problem] = problems(part)
    assert problem.code == code and words in str(problem)


def test_parts_of_torch_take_what_torch_takes():
    parsed = read({
        "optimizer": {"type": "RMSprop", "params": {"alpha": 0.9}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": [1e-4, "1e-5"], "cycle_max_lr": 1e-3}},
    })  # fmt: skip
    assert parsed["optimizer.params"] == {"alpha": 0.9}
    assert parsed["scheduler.params"]["cycle_min_lr"] == [1e-4, 1e-5]


def test_auto_among_parameters_of_torch() -> None:
    parts = {
        "optimizer": {"type": "RMSprop", "params": {"lr": "auto", "alpha": "auto", "momentum": 0.5}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 3, "gamma": "auto"}},
    }
    plain = read({"train_batch_size": 8, **parts})
    assert plain["optimizer.params"] == {"momentum": 0.5} and plain["scheduler.params"] == {"step_size": 3}
    parsed = read({"train_batch_size": 8, **parts}, hints={"learning_rate": 0.25, "scheduler.params.gamma": 0.5})
    assert parsed["optimizer.params"] == {"lr": 0.25, "momentum": 0.5}
    assert parsed["scheduler.params"] == {"step_size": 3, "gamma": 0.5}


def test_of_two_buckets_the_one_that_does_not_count_is_told() -> None:
    sizes = {"stage": 2, "reduce_bucket_size": 2e8, "allgather_bucket_size": 4e8}
    parsed = read({"train_batch_size": 8, "zero_optimization": sizes})
    assert [row.name for row in parsed.given] == ["zero", "options.zero.bucket_cap_mb"]
    (row,) = parsed.unused
    assert row.field == "zero_optimization.reduce_bucket_size" and "allgather_bucket_size" in row.reason


def test_a_first_scale_that_no_float_holds() -> None:
    with pytest.raises(ConfigError, match=r"initial_scale_power cannot be 2000[\s\S]*from 0 to 127"):
        read({"train_batch_size": 8, "fp16": {"enabled": True, "initial_scale_power": 2000}})


def test_a_block_is_read_as_scripts_write_it():
    parsed = read({"train_batch_size": 8, "fp16": {"enabled": True}})
    assert parsed["fp16"]["enabled"] is parsed["fp16.enabled"] is True and parsed["zero_optimization"]["stage"] == 0
    with pytest.raises(KeyError):
        parsed["no_such_block"]


def test_a_config_says_which_keys_were_given_as_the_dict_of_a_script_does():
    config = read(nested(train_batch_size=4, zero_optimization__stage=2, optimizer__type="Adam"))
    assert list(config) == list(config.keys()) == ["train_batch_size", "zero_optimization", "optimizer"]
    assert (
        "zero_optimization" in config and "stage" in config["zero_optimization"] and "zero_optimization.stage" in config
    )
    assert "fp16" not in config and "overlap_comm" not in config["zero_optimization"] and 0 not in config
    assert config["fp16"]["enabled"] is False


@pytest.mark.parametrize(
    ("config", "env", "expected"),
    [
        ({}, {}, 8),
        ({"sequence_parallel_size": 2}, {}, 4),
        ({}, {"PACELINE_TP": "2"}, 4),
        ({"sequence_parallel_size": 2}, {"PACELINE_TP": "2"}, 2),
        ({"tensor_parallel": {"autotp_size": 4}}, {}, 2),
        ({"zero_optimization": {"stage": 3}, "sequence_parallel_size": 4}, {}, 2),
    ],
)
def test_the_batch_triangle_counts_ranks_that_read_samples(config, env, expected):
    """`paceline launch --tp` hands its number over as a variable."""
    parsed = read({"train_batch_size": 16, "gradient_accumulation_steps": 2, **config})
    ranks = data_ranks(parsed, 8, env)
    assert ranks == expected
    assert parsed.batch(ranks).micro == 16 // 2 // expected


@pytest.mark.parametrize("env", [{"PACELINE_TP": "2"}, {}])
def test_a_batch_that_does_not_divide_is_refused(env):
    config = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4, "sequence_parallel_size": 2}
    parsed = read(config)
    with pytest.raises(ConfigError) as error:
        parsed.batch(data_ranks(parsed, 16 if env else 8, env))
    assert error.value.code == "deepspeed-batch"
