"""Each setting is defined once, and everything else follows from that."""

import argparse

import pytest

from paceline.config import LaunchSettings, RunSettings, schema
from paceline.config.settings import settings_of


def parse(*words, classes=()):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    schema.add_options(parser, *classes)
    return schema.given(parser.parse_args(words))


def test_defaults_are_one_process_in_float32():
    run, launch = RunSettings(), LaunchSettings()
    assert (run.mixed_precision, run.accumulate, run.axes["replicate"], run.axes["shard"]) == ("no", 1, "auto", "auto")
    assert (launch.procs, launch.nodes, launch.main_port) == ("auto", 1, 0)


def test_settings_are_frozen():
    with pytest.raises(AttributeError):
        RunSettings().zero = 2


def test_run_and_launch_share_no_name():
    assert not set(settings_of(RunSettings)) & set(settings_of(LaunchSettings))


def test_every_setting_has_a_sentence():
    for each in settings_of().values():
        assert each.doc.endswith(".") and each.doc[0].isupper(), each.name


@pytest.mark.parametrize("name", [name for name in settings_of() if "_" in name])
def test_hyphens_and_underscores_are_one(name):
    each = settings_of()[name]
    value = [] if each.kind.metavar == "" else ["1"]
    for flag in (each.flag, "--" + name):
        [found] = parse(flag, *value)
        assert (found.name, found.source, found.where) == (name, "command line", flag)


@pytest.mark.needs("accelerate")
def test_accelerate_spells_the_same_settings():
    words = (
        "--num_machines 2 --machine-rank 1 --main_process_ip h --main_process_port 9 --num_cpu_threads_per_process 3"
    )
    assert [each.value for each in parse(*words.split())] == ["2", "1", "h", "9", "3"]


def test_a_switch_can_be_turned_off():
    [found] = parse("--no-cpu")
    assert (found.name, found.value) == ("cpu", "false")


def test_short_flags():
    assert [(each.name, each.value) for each in parse("-n", "2", "-m", "-t", "3")] == [
        ("procs", "2"),
        ("module", "true"),
        ("tee", "3"),
    ]


@pytest.mark.needs("accelerate")
def test_variables_for_the_reference_page():
    rows = {row.name: row for row in schema.variables()}
    assert rows["PACELINE_TP"].parse("2") == 2 and rows["ACCELERATE_USE_CPU"].default is False
    assert len(rows) == len(schema.variables())


def test_the_docs_table_names_every_setting_once():
    text = schema.table()
    for name in settings_of():
        assert text.count(f"\n| `{name}` |") == 1
    assert text.count("### ") == len({each.group for each in settings_of().values()})


@pytest.mark.needs("accelerate")
def test_words_say_the_same_again():
    said = ["-n", "2", "--no-cpu", "--mixed_precision", "bf16", "--multi_gpu", "--num_processes", "4"]
    assert schema.words(parse(*said)) == said
