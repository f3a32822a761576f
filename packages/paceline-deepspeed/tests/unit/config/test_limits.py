"""Small inputs that would cost minutes or gigabytes: each is refused at once, and no message is longer than a page."""

import json
import os

import pytest

from paceline import ConfigError
from paceline.base.errors import MAX_PROBLEMS, Problem, short_repr
from paceline.config import files, limits, options
from paceline.config.given import Given
from paceline_deepspeed.config import read as read_deepspeed

LONGEST_MESSAGE = 10_000


def anchors(levels: int) -> str:
    """YAML whose last value stands for 10 ** levels single ones."""
    lines = ["deepspeed_config:", "  a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"  a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    return "\n".join(["distributed_type: DEEPSPEED", *lines, ""])


def many_keys(count: int) -> str:
    return "".join(f"key_{number}: {number}\n" for number in range(count))


YAML = {
    "anchors": (anchors(12), "more than 10,000 keys and values"),
    "an alias of itself": ("options: &a {shard: [*a]}", "contains the alias itself"),
    "many keys": (many_keys(11_000), "more than 10,000 keys and values"),
    "a long file": ("# " + "x" * limits.MAX_BYTES, "more than 1,048,576 bytes"),
    "flow depth": ("a: " + "[" * 100_000 + "]" * 100_000, "nested more than 100 deep"),
    "block depth": ("- " * 5000, "nested more than 100 deep"),
}


@pytest.mark.parametrize("text, why", YAML.values(), ids=YAML.keys())
def test_a_yaml_file_that_is_too_large(tmp_path, text, why):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        files.read(str(path))
    assert caught.value.code == "config-size" and len(str(caught.value)) < LONGEST_MESSAGE


def test_many_wrong_keys_within_the_limit_make_a_short_message(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(many_keys(100))
    content = files.read(str(path))
    message = str(ConfigError.of(content.problems))
    assert message.startswith("100 problems:\n1. ") and message.endswith("\nand 80 more problems.")
    assert len(message) < LONGEST_MESSAGE


def test_options_of_a_variable():
    given = Given("options", "{a: &a [x, x, x], b: [" + "*a, " * 5000 + "]}", "environment", "PACELINE_OPTIONS")
    [problem] = options.read(given)
    assert problem.code == "config-size" and len(str(problem)) < LONGEST_MESSAGE


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"fp16": value}
    return value


def endless() -> dict:
    value: dict = {}
    value["fp16"] = value
    return value


# Made where they are used: at collection they would stay in memory, which each fork of a later test copies.
DICTS = {
    "depth": lambda: nested(500),
    "itself": endless,
    "keys": lambda: {f"key_{number}": number for number in range(700_000)},
    "list": lambda: {"optimizer": [0] * 700_000},
}


@pytest.mark.parametrize("name", DICTS)
def test_a_deepspeed_dict_that_is_too_large(name):
    config = DICTS[name]()
    with pytest.raises(ConfigError) as caught:
        read_deepspeed(config)
    assert caught.value.code == "config-size" and len(str(caught.value)) < LONGEST_MESSAGE


DEEPSPEED = {
    "keys": json.dumps({f"key_{n}": n for n in range(20_000)}),
    "the same key": "{" + ", ".join(['"fp16": {}'] * 20_000) + "}",
    "depth": json.dumps(nested(300)),
    "depth beyond Python's": '{"a": ' * 20_000 + "1" + "}" * 20_000,
    "digits": '{"train_batch_size": ' + "1" * 100_000 + "}",
    "a long value": json.dumps({"train_batch_size": "x" * 900_000}),
    "keys that no search finds": json.dumps({f"\\u00e{n % 10}{n}": n for n in range(100)}, ensure_ascii=True),
}


@pytest.mark.parametrize("text", DEEPSPEED.values(), ids=DEEPSPEED.keys())
def test_a_deepspeed_file_that_is_too_large(tmp_path, text):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_deepspeed(str(path))
    assert caught.value.code in ("config-size", "config-syntax", "config-value", "config-key")
    assert len(str(caught.value)) < LONGEST_MESSAGE
    assert os.fspath(path) in str(caught.value)


def test_names_are_suggested_only_for_the_keys_that_are_shown(tmp_path, monkeypatch):
    path = tmp_path / "run.yaml"
    path.write_text("mixd_precision: bf16\n" + many_keys(1000))
    compared = []
    nearest = files.nearest
    monkeypatch.setattr(files, "nearest", lambda name, words: compared.append(name) or nearest(name, words))
    problems = files.read(str(path)).problems
    assert len(problems) == 1001 and problems[0].fix == "write 'mixed_precision'"
    assert len(set(compared)) == MAX_PROBLEMS


def test_texts_of_a_problem_are_cut():
    text = "a" * 1_000_000 + "end"
    problem = Problem("plan-size", text, [text, *["reason"] * 100], text)
    assert len(str(problem)) < 15_000 and "characters left out" in problem.what and problem.what.endswith("end")
    assert problem.why[-1] == "and 61 more reasons"


@pytest.mark.parametrize("make", [lambda: 10**100_000, lambda: "x" * 10**6, lambda: [[["x"] * 10**4] * 10**4] * 10])
def test_a_value_is_shown_in_short(make):
    assert len(short_repr(make())) < 300
