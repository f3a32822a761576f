"""Options of strategies from a file, a variable, flags and code: merged one by one, each with its source and place."""

import argparse
import json

import pytest

from paceline.base.errors import ConfigError
from paceline.config import Given, resolve_launch, resolve_run, schema
from paceline.config.overrides import Overrides

YAML = """\
shard: 2
options:
  shard:
    reshard: no
    wrap: [Block, Head]
  tensor:
    plan:
      layers.*.q: colwise
      layers.*.o: rowwise
  context:
"""


def flag(text):
    return Given("options", text, "command line", "--option")


def rows(found):
    return {row.field: (row.value, row.source, row.where) for row in found.decisions if row.field.startswith("options")}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    return str(file)


def test_a_file_says_each_option_on_its_own_line(path):
    found = resolve_launch([Given("config", path, "command line", "--config")], {})
    assert found.run.options == {
        "shard": {"reshard": "no", "wrap": ["Block", "Head"]},
        "tensor": {"plan": {"layers.*.q": "colwise", "layers.*.o": "rowwise"}},
    }
    assert rows(found)["options.shard.reshard"] == ("no", "file", f"{path}:4")
    assert rows(found)["options.tensor.plan"][2] == f"{path}:7"


def test_flags_are_read_as_yaml_and_may_be_repeated():
    parser = argparse.ArgumentParser()
    schema.add_options(parser)
    said = ["--option", "shard.reshard=no", "--option", "shard.wrap=[A, B]", "--option", "pipeline.split={a: 1}"]
    given = schema.given(parser.parse_args(said))
    found = resolve_launch(given, {}, search=False)
    assert found.run.options == {"shard": {"reshard": "no", "wrap": ["A", "B"]}, "pipeline": {"split": {"a": 1}}}
    assert rows(found)["options.shard.wrap"] == (["A", "B"], "command line", "--option")
    assert schema.words(given) == said


def test_each_option_has_its_strongest_source(path):
    flags = [Given("config", path, "command line", "--config"), flag("shard.reshard=yes"), flag("shard.prefetch=2")]
    env = {"PACELINE_OPTIONS": '{"shard": {"prefetch": 3, "min_params": 10}}'}
    told = resolve_launch(flags, env)
    plan = {"options": {"shard": {"min_params": 1}}, "tp": 2}
    code = Overrides(plan=plan, options={"shard": {"min_params": 99, "ignored": print}})
    worker = resolve_run(code, {**env, **told.hand_over()})
    assert worker.settings.axes["tp"] == 2 and worker.settings.axes["shard"] == 2
    assert worker.settings.options["shard"] == {
        "reshard": "yes", "wrap": ["Block", "Head"], "prefetch": "2", "min_params": 99, "ignored": print,
    }  # fmt: skip
    found = rows(worker)
    assert found["options.shard.reshard"] == ("yes", "command line", "--option")
    assert found["options.shard.wrap"] == (["Block", "Head"], "file", f"{path}:5")
    assert found["options.shard.min_params"] == (99, "code", "Accelerator(options=...)")
    reasons = {row.field: row.reason for row in (*told.decisions, *worker.decisions)}
    assert {row.field: row.reason for row in told.decisions}["options.shard.reshard"] == f"instead of no ({path}:4)"
    assert reasons["options.shard.prefetch"] == "instead of 3 (PACELINE_OPTIONS)"


def test_workers_are_handed_flags_and_file_alone(path):
    flags = [Given("config", path, "command line", "--config"), flag("shard.prefetch=2")]
    handed = json.loads(resolve_launch(flags, {"PACELINE_OPTIONS": "{a: {b: 1}}"}).hand_over()["PACELINE_SETTINGS"])
    assert handed["options.shard.prefetch"] == ["2", "command line", "--option"]
    assert "options.tensor.plan" in handed and "options.a.b" not in handed


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (flag("shard.reshard"), "expected: STRATEGY.OPTION=VALUE"),
        (flag("reshard=no"), "expected: STRATEGY.OPTION=VALUE"),
        (flag("shard.wrap=[A"), "not YAML"),
        (flag("shard.wrap="), "a value after the ="),
    ],
)
def test_flags_that_say_nothing_are_errors(said, text):
    with pytest.raises(ConfigError, match=text.replace("[", r"\[")):
        resolve_launch([said], {}, search=False)


@pytest.mark.parametrize("text", ["shard", "{shard: 2}", "[shard]", "{shard: {reshard: [}}"])
def test_a_variable_that_is_no_block_is_an_error(text):
    with pytest.raises(ConfigError) as caught:
        resolve_run(env={"PACELINE_OPTIONS": text})
    assert caught.value.code in ("config-value", "config-syntax")


def test_blocks_of_another_form_name_the_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("options:\n  shard: 3\n  tensor:\n    loss: yes\n    loss: no\n")
    with pytest.raises(ConfigError) as caught:
        resolve_run(env={"PACELINE_CONFIG": str(path)})
    assert [problem.code for problem in caught.value.problems] == ["config-value", "config-twice"]
    assert f"{path}:2" in str(caught.value) and f"{path}:5" in str(caught.value)
    path.write_text("options: 3\n")
    with pytest.raises(ConfigError, match="options cannot be '3'"):
        resolve_run(env={"PACELINE_CONFIG": str(path)})


def test_code_of_another_form_is_an_error():
    with pytest.raises(ConfigError) as caught:
        resolve_run(Overrides(plan={"options": 4, "sahrd": 2}, options={"shard": 3}), {})
    text = str(caught.value)
    assert "options.shard cannot be 3" in text and "options cannot be 4" in text and "'shard'" in text
    assert "Accelerator(plan={'sahrd': ...})" in text


def test_a_plan_may_be_a_file_and_flags_win_over_it(path):
    found = resolve_run(Overrides(plan=path), {})
    assert (found.settings.axes["shard"], found.settings.options["shard"]["reshard"]) == (2, "no")
    assert rows(found)["options.shard.reshard"] == ("no", "file", f"{path}:4")
    env = resolve_launch([Given("shard", "4", "command line", "--shard")], {}, search=False).hand_over()
    assert resolve_run(Overrides(plan=path), env).settings.axes["shard"] == 4
    with pytest.raises(ConfigError, match="nowhere"):
        resolve_run(Overrides(plan="nowhere.yaml"), {})
