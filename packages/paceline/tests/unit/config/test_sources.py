"""Merging: code > command line > environment > file > default, each value with its source and place."""

import itertools
import json
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

import pytest

from paceline.base.errors import ConfigError
from paceline.config import Given, LaunchSettings, RunSettings, resolve_launch, resolve_run
from paceline.config.overrides import ARGUMENTS, Overrides
from paceline.config.places import own_default
from paceline.config.settings import settings_of
from paceline.config.sources import hand_over

SAMPLES = {  # four different values of each kind, one for each source that is not the default
    "mixed_precision": ("fp16", "bf16", "no", "fp16"),
    "gpu_ids": ("0", "1", "2", "3"),
    "main_address": ("a", "b", "c", "d"),
    "rdzv_backend": ("a", "b", "c", "d"),
    "rdzv_conf": ("a=1", "b=1", "c=1", "d=1"),
    "store": ("etcd://a", "etcd://b", "c10d://c", "etcds://d"),
    "tls": ("no", "yes", "a,b", "a,b,c"),
    "cores": (False, True, False, True),
    "log_dir": ("a", "b", "c", "d"),
    "tee": ("0", "1", "2", "3"),
    "compat": ("accelerate",) * 4,
    "profile": ("flops", "comms", "memory", "all"),
    "zero": ("1", "2", "3", "1"),
    "recompute": ("blocks", "selective", "2", "3"),
    "offload": ("optimizer", "all", "no", "optimizer"),
    "launcher": ("ssh", "pdsh", "openmpi", "slurm"),
    "ray_resources": ("a=1", "b=1", "c=1", "d=1"),
}
STRENGTH = ("file", "environment", "command line", "code")
ARGUMENTS_OF_ITS_OWN = {field.name for field in fields(Overrides)} - {"plan", "options"}


def samples(name):
    kind = settings_of()[name].kind
    if name in SAMPLES:
        return SAMPLES[name]
    words = kind.metavar.split("|") if kind.metavar.islower() else ()
    if len(words) > 1:
        return (*words, *words)[:2] * 2
    return ("no", "yes", "no", "yes") if kind.metavar == "" else ("2", "3", "4", "5")


def row(decisions, name):
    return next(decision for decision in decisions if decision.field == name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.needs("accelerate")] if name == "compat" else [])
        for name in settings_of()
        if settings_of()[name].in_file and name != "options"
    ],
)
def test_the_strongest_source_wins_for_every_subset(name, tmp_path):
    setting = settings_of()[name]
    values = dict(zip(STRENGTH, samples(name), strict=True))
    usable = STRENGTH if name in settings_of(RunSettings) else STRENGTH[:3]
    path = tmp_path / "run.yaml"
    path.write_text(f"# a comment\n{name}: {values['file']}\n")
    for size in range(len(usable) + 1):
        for sources in itertools.combinations(usable, size):
            env = {setting.variable: values["environment"]} if "environment" in sources else {}
            flags = [Given("config", str(path), "command line", "--config")] if "file" in sources else []
            flags += [Given(name, values["command line"], "command line", setting.flag)] * ("command line" in sources)
            resolved = resolve_launch(flags, env, search=False)
            if name in settings_of(RunSettings):
                code = {name: values["code"] if "code" in sources else None}
                said = Overrides(**code) if name in ARGUMENTS_OF_ITS_OWN else Overrides(plan=code)
                worker = resolve_run(said, {**env, **resolved.hand_over()})
                value, decision = worker.settings.by_name()[name], row(worker.decisions, name)
            else:
                owner = next(part for part in (resolved.launch, *resolved.cluster.values()) if name in vars(part))
                value, decision = getattr(owner, name), row(resolved.decisions, name)
            winner = sources[-1] if sources else "default"
            where = {"default": "", "file": f"{path}:2", "environment": setting.variable,
                     "command line": setting.flag, "code": f"Accelerator(plan={{{name!r}: ...}})"}  # fmt: skip
            if name in ARGUMENTS_OF_ITS_OWN:
                where["code"] = f"Accelerator({ARGUMENTS.get(name, name)}=...)"
            assert value == (setting.kind.read(values[winner]) if sources else setting.default), sources
            assert (decision.source, decision.where) == (winner, where[winner])
            assert decision.value == value


def test_every_setting_has_a_decision_in_order():
    single = [name for name in settings_of() if name != "options"]
    assert [decision.field for decision in resolve_run(env={}).decisions] == [
        n for n in single if n in settings_of(RunSettings)
    ]
    resolved = resolve_launch((), {}, search=False)
    assert [decision.field for decision in resolved.decisions] == single
    assert (resolved.launch, resolved.run) == (LaunchSettings(), RunSettings())


def test_what_lost_is_named():
    resolved = resolve_run(Overrides(plan={"tp": 4}), {"PACELINE_TP": "2"})
    assert row(resolved.decisions, "tp").reason == "instead of 2 (PACELINE_TP)"


def test_the_last_flag_wins():
    flags = [Given("tp", "2", "command line", "--tp"), Given("tp", "4", "command line", "--tp")]
    assert resolve_launch(flags, {}, search=False).run.axes["tp"] == 4


@pytest.mark.needs("accelerate")
@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp16", "mixed_precision", "fp16"),
        ("ACCELERATE_USE_CPU", "true", "cpu", True),
        ("ACCELERATE_DEBUG_MODE", "1", "debug", True),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8", "accumulate", 8),
        ("PARALLELISM_CONFIG_TP_SIZE", "2", "tp", 2),
    ],
)
def test_accelerates_variables_are_read(variable, text, name, value):
    resolved = resolve_run(env={variable: text})
    assert resolved.settings.by_name()[name] == value
    assert row(resolved.decisions, name).where == variable


def test_code_beats_accelerates_variable():
    resolved = resolve_run(Overrides(accumulate=4), {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"})
    assert resolved.settings.accumulate == 4


def test_our_variable_beats_accelerates():
    env = {"PACELINE_MIXED_PRECISION": "bf16", "ACCELERATE_MIXED_PRECISION": "fp16"}
    assert resolve_run(env=env).settings.mixed_precision == "bf16"


def test_an_empty_variable_says_nothing():
    assert resolve_run(env={"PACELINE_TP": ""}).settings.axes["tp"] == 1


def test_a_misspelt_variable_is_noticed():
    variables = {"PACELINE_MIXED_PRECISON": "fp16"}
    [notice] = resolve_run(env=variables).notices
    assert "PACELINE_MIXED_PRECISION" in notice
    handed = resolve_launch({}, variables).hand_over()
    assert not resolve_run(env={**variables, **handed}).notices  # the launcher has said it


def test_all_bad_values_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        resolve_run(Overrides(plan={"tp": "two", "nonsense": 1}), {"PACELINE_CPU": "maybe"})
    codes = [problem.code for problem in caught.value.problems]
    assert sorted(codes) == ["config-key", "config-value", "config-value"]
    text = str(caught.value)
    assert "Accelerator(plan={'tp': ...})" in text and "PACELINE_CPU" in text and "yes or no" in text


def test_an_override_has_the_type_of_its_setting():
    settings = {field.name: field.type for field in fields(RunSettings)}
    for override in fields(Overrides):
        if override.name not in ("plan", "options"):
            assert override.type in (settings[override.name], f"{settings[override.name]} | None")


def test_the_handed_variable_holds_flags_and_file_alone(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("accumulate: 2\nprocs: 3\n")
    flags = [Given("config", str(path), "command line", "--config"), Given("tp", "2", "command line", "--tp")]
    resolved = resolve_launch(flags, {"PACELINE_CPU": "yes"})
    assert json.loads(resolved.hand_over()["PACELINE_SETTINGS"]) == {
        "accumulate": [2, "file", f"{path}:1"],
        "tp": [2, "command line", "--tp"],
    }
    assert hand_over(()) == "{}"


@pytest.mark.parametrize("text", ["{", "[1]", '{"tp": 2}', '{"tp": [2]}'])
def test_a_broken_handed_variable_is_an_error(text):
    with pytest.raises(ConfigError) as caught:
        resolve_run(env={"PACELINE_SETTINGS": text})
    assert caught.value.code == "settings-handed"


def test_without_our_launcher_the_named_file_is_read(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("tp: 2\nprocs: 4\n")
    assert resolve_run(env={"PACELINE_CONFIG": str(path)}).settings.axes["tp"] == 2
    assert resolve_run(env={"PACELINE_CONFIG": str(path), "PACELINE_SETTINGS": "{}"}).settings.axes["tp"] == 1


def test_a_bad_file_is_an_error_without_our_launcher_too(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("tpp: 2\n")
    with pytest.raises(ConfigError) as caught:
        resolve_run(env={"PACELINE_CONFIG": str(path)})
    assert caught.value.code == "config-key"


def test_accelerates_total_becomes_a_number_per_node():
    flags = [Given("num_processes", "8", "command line", "--num_processes"),
             Given("nodes", "2", "command line", "--nodes")]  # fmt: skip
    resolved = resolve_launch(flags, {}, search=False)
    assert resolved.launch.procs == 4
    assert row(resolved.decisions, "procs").reason == "8 over all 2 nodes"
    assert resolve_launch(flags[:1], {}, search=False).launch.procs == 8


def test_a_total_that_cannot_be_divided_is_refused():
    flags = [Given("num_processes", "3", "command line", "--num_processes"),
             Given("nodes", "2", "environment", "PACELINE_NODES")]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        resolve_launch(flags, {}, search=False)
    assert caught.value.code == "procs-split"
    assert "--num_processes" in str(caught.value) and "PACELINE_NODES" in str(caught.value)


def test_a_total_is_not_divided_over_a_range_of_nodes():
    flags = [Given("num_processes", "4", "command line", "--num_processes"),
             Given("nodes", "1:3", "command line", "--nodes")]  # fmt: skip
    with pytest.raises(ConfigError, match="over 1:3 nodes") as caught:
        resolve_launch(flags, {}, search=False)
    assert caught.value.code == "procs-split"


@pytest.mark.needs("accelerate")
def test_procs_over_a_total_from_a_weaker_source(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text("num_processes: 3\nnum_machines: 2\nmain_process_ip: a\n")
    flags = [Given("config", str(path), "command line", "--config"), Given("procs", "4", "command line", "--procs")]
    assert resolve_launch(flags, {}).launch.procs == 4


@pytest.mark.needs("accelerate")
@pytest.mark.parametrize(
    ("name", "text"),
    [("tpu", "true"), ("use_megatron_lm", "true"), ("gradient_clipping", "1.0")],
)  # fmt: skip
def test_flags_of_engines_are_refused_with_what_to_do(name, text):
    with pytest.raises(ConfigError) as caught:
        resolve_launch([Given(name, text, "command line", f"--{name}")], {}, search=False)
    assert caught.value.code == "accelerate-feature"
    assert caught.value.problems[0].fix


@pytest.mark.needs("accelerate", "hosts")
def test_the_hostfile_of_mpirun():
    flag = Given("mpirun_hostfile", "hosts", "command line", "--mpirun_hostfile")
    launch = resolve_launch([flag], {}, search=False).launch
    assert (launch.hostfile, launch.launcher) == ("hosts", "openmpi")


@pytest.mark.needs("accelerate")
def test_flags_without_effect_are_noticed():
    resolved = resolve_launch([Given("same_network", "true", "command line", "--same_network")], {}, search=False)
    assert [decision.field for decision in resolved.unused] == ["same_network"]
    assert resolved.notices == ("same_network (--same_network) has no effect: nodes are found by main_address alone.",)


@pytest.mark.needs("accelerate")
def test_dynamo_turned_off_asks_for_nothing():
    assert resolve_launch([Given("dynamo_backend", "no", "command line", "--dynamo_backend")], {}, search=False).unused


@pytest.mark.needs("hosts")
def test_a_launcher_has_settings_of_its_own():
    resolved = resolve_launch([Given("partition", "long", "command line", "--partition")], {}, search=False)
    assert resolved.cluster["slurm"].partition == "long"
    assert row(resolved.decisions, "partition").where == "--partition"


def test_a_user_without_a_home_has_default_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> NoReturn:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert own_default({}) == Path("/.config/paceline/config.yaml")
