"""DeepSpeed's parsers of hostfiles, filters and its command line; the values are what DeepSpeed 0.19.8 gives."""

import pytest

from paceline.base.errors import ConfigError
from paceline_deepspeed.partition import balanced, uniform
from paceline_deepspeed.runner import (
    encode_world_info,
    fetch_hostfile,
    parse_args,
    parse_inclusion_exclusion,
    parse_resource_filter,
)

POOL = {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [("a slots=2\nb slots=4\n", {"a": 2, "b": 4}), ("# all\n\na slots=2 # two\n", {"a": 2})],
)
def test_hostfiles(tmp_path, text, hosts):
    path = tmp_path / "hosts"
    path.write_text(text)
    assert fetch_hostfile(path) == hosts
    assert fetch_hostfile(tmp_path / "none") is None


@pytest.mark.parametrize("text", ["a slots=2\na slots=3\n", "a\n", "", "a slots=x\n"])
def test_hostfiles_that_are_wrong(tmp_path, text):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"\[hostfile\]"):
        fetch_hostfile(path)


@pytest.mark.parametrize(
    ("include", "exclude", "slots"),
    [
        ("", "", POOL),
        ("a", "", {"a": [0, 1, 2, 3]}),
        ("a:0,2", "", {"a": [0, 2]}),
        ("a@b:1", "", {"a": [0, 1, 2, 3], "b": [1]}),
        ("", "b", {"a": [0, 1, 2, 3]}),
        ("", "a:0,1,2,3", {"b": [0, 1, 2, 3]}),
    ],
)
def test_filters(include, exclude, slots):
    assert parse_resource_filter(POOL, include, exclude) == slots
    assert parse_inclusion_exclusion({"a": 4, "b": 4}, include, exclude) == slots


@pytest.mark.parametrize(("include", "exclude"), [("c", ""), ("a:9", ""), ("a", "b"), ("a:0-2", "")])
def test_filters_that_are_wrong(include, exclude):
    with pytest.raises(ConfigError) as caught:
        parse_resource_filter(POOL, include, exclude)
    assert caught.value.code == "host-filter"


def test_the_command_line_and_the_world():
    told = parse_args(["--num_gpus", "2", "--hostfile", "h", "train.py", "--x", "1"])
    assert (told.num_gpus, told.hostfile, told.user_script, told.user_args) == (2, "h", "train.py", ["--x", "1"])
    plain = parse_args(["train.py"])
    assert (plain.hostfile, plain.num_nodes, plain.launcher, plain.master_port) == ("/job/hostfile", -1, "pdsh", 29500)
    assert encode_world_info({"a": [0, 1], "b": [0]}) == "eyJhIjogWzAsIDFdLCAiYiI6IFswXX0="


def test_partitions():
    assert [uniform(*sizes) for sizes in ((10, 3), (3, 4), (0, 2), (7, 2))] == [
        [0, 4, 7, 10], [0, 1, 2, 3, 3], [0, 0, 0], [0, 4, 7],
    ]  # fmt: skip
    assert balanced([1, 2, 3, 4, 5, 6], 3) == [0, 3, 5, 6]
    assert balanced([0, 0, 5, 0], 2) == [0, 3, 4]
    assert balanced([1, 1, 1, 1, 1, 1, 1, 10], 4) == [0, 3, 5, 7, 8]
