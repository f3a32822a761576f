"""Asks the questions of a table one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.base.errors import ConfigError
from paceline_accelerate.commands.config.menu import BulletMenu, read_line
from paceline_accelerate.commands.config.questions import YES_NO, Answers, Choices, Line, Question


def ask(questions: Iterable[Question], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answers to the questions that arise, by their names, together with what is known beforehand.

    Raises:
        ConfigError: `config-terminal` if the input ends early, or the problem of an answer that cannot be used.
    """
    answers = dict(known)
    try:
        for question in questions:
            if not all(condition(answers) for condition in question.when):
                continue
            answers[question.name] = _answer(question, answers)
            problem = question.problem(answers)
            if problem is not None:
                raise ConfigError.of([problem])
    except EOFError:
        print()  # the error begins in a line of its own
        raise ConfigError(
            "config-terminal",
            "the questions were not answered to the end.",
            "the input has ended",
            "answer them all, or run `accelerate config default`, which asks nothing",
        ) from None
    return answers


def _answer(question: Question, answers: Answers) -> Any:
    if isinstance(question.answer, Line):
        return _typed(question, question.answer)
    choices = question.answer(answers) if callable(question.answer) else question.answer
    return _chosen(question, choices)


def _chosen(question: Question, choices: Choices) -> Any:
    values = list(choices.values())
    marked = 0 if question.default is None else values.index(question.default)
    return values[BulletMenu(question.text, list(choices)).run(marked)]


def _typed(question: Question, line: Line) -> Any:
    """Asks until the text can be read."""
    prompt = f"{question.text}: "
    if line is YES_NO:
        prompt = f"{question.text} [{'YES/no' if question.default else 'yes/NO'}]: "
    elif question.default is not None:
        prompt = f"{question.text} [{question.default}]: "
    while True:
        text = read_line(prompt)
        if not text and question.default is not None:
            return question.default
        try:
            return line.read(text)
        except (ValueError, KeyError):
            print(f"{text!r} cannot be read; expected: {line.expected}.")
