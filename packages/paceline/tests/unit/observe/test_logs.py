"""`get_logger`: who speaks, and what is left alone."""

from __future__ import annotations

import logging

import pytest

from paceline.base import env
from paceline.base.errors import ConfigError, WorldError
from paceline.observe.logs import get_logger

RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"} | {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.fixture
def alone():
    with env.patched(dict.fromkeys(RANK_1)):
        yield


def test_one_process_speaks_and_the_record_names_the_callers_line(alone, caplog):
    logger = get_logger("test.one", log_level="INFO")
    logger.info("hello %d", 3)
    logger.info("in order", in_order=True)
    logger.log(logging.INFO, "direct")
    assert [record.getMessage() for record in caplog.records] == ["hello 3", "in order", "direct"]
    assert {record.filename for record in caplog.records} == {"test_logs.py"}


def test_the_root_logger_is_left_alone(alone):
    before = (logging.root.level, list(logging.root.handlers))
    get_logger("test.root", log_level="debug")
    assert (logging.root.level, logging.root.handlers) == before
    assert logging.getLogger("test.root").level == logging.DEBUG


def test_other_ranks_are_silent_unless_asked(caplog):
    with env.patched(RANK_1):
        logger = get_logger("test.other", log_level="INFO")
        logger.info("main")
        logger.info("all", main_process_only=False)
    assert [record.getMessage() for record in caplog.records] == ["all"]


def test_in_order_without_a_group_is_an_error():
    with env.patched(RANK_1), pytest.raises(WorldError, match="make the Accelerator first") as caught:
        get_logger("test.order").info("x", in_order=True)
    assert caught.value.code == "log-order"


def test_the_level_comes_from_the_environment_where_none_is_given(alone):
    with env.patched({"PACELINE_LOG_LEVEL": "warning"}):
        get_logger("test.env")
    assert logging.getLogger("test.env").level == logging.WARNING


def test_a_level_that_does_not_exist(alone):
    with pytest.raises(ConfigError, match="LOUD") as caught:
        get_logger("test.level", log_level="LOUD")
    assert caught.value.code == "log-level"


def test_warning_once(alone, caplog):
    logger = get_logger("test.once")
    for _ in range(3):
        logger.warning_once("careful: %s", "this")
    logger.warning_once("careful: %s", "that")
    assert [record.getMessage() for record in caplog.records] == ["careful: this", "careful: that"]
    assert {record.filename for record in caplog.records} == {"test_logs.py"}
