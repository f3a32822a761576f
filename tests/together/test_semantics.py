"""How a loop is meant is one value, which the plan carries and explains, and which whoever acts reads."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

import paceline
import paceline_accelerate
import paceline_deepspeed
import paceline_lens
from paceline.config.settings import RunSettings
from paceline.plan.plan import Plan
from paceline.plan.resolve import draft
from paceline.plan.semantics import NATIVE, Semantics
from paceline_accelerate.semantics import ACCELERATE
from paceline_deepspeed.semantics import DEEPSPEED


def test_the_native_plan_says_nothing_of_it():
    assert NATIVE.explain() == ""
    assert Plan().explain() == Plan(semantics=NATIVE).explain()


@pytest.mark.parametrize("semantics", [ACCELERATE, DEEPSPEED])
def test_the_plan_says_whose_loop_it_is(semantics):
    heading, meaning, *_ = Plan(semantics=semantics).explain().splitlines()
    assert heading == Plan().explain().splitlines()[0]
    assert semantics.library in meaning and meaning.strip() == semantics.explain()


def test_each_difference_is_in_the_line():
    line = ACCELERATE.explain()
    assert len(line.split("; ")) == 8
    for field in fields(Semantics):
        values = {getattr(semantics, field.name) for semantics in (NATIVE, ACCELERATE, DEEPSPEED)}
        if field.name == "library":
            continue
        assert len(values) > 1, f"{field.name} is the same for all: nothing decides by it"
        [other, *_] = values - {getattr(NATIVE, field.name)}
        assert replace(NATIVE, **{field.name: other}).explain(), field.name


def test_each_field_is_read_by_someone():
    texts = []
    for package in (paceline, paceline_lens, paceline_accelerate, paceline_deepspeed):
        texts += [path.read_text() for path in Path(package.__path__[0]).rglob("*.py") if path.name != "semantics.py"]
    for field in fields(Semantics):
        assert any(re.search(rf"semantics\.{field.name}\b", text) for text in texts), field.name


def test_a_setting_decides_the_tail_where_it_is_given():
    assert draft(RunSettings(), [], 1).semantics == NATIVE
    assert draft(RunSettings(even_batches=True), [], 1).semantics == replace(NATIVE, tail="pad")
    assert draft(RunSettings(), [], 1, ACCELERATE).semantics == ACCELERATE
