"""Defines the exceptions of Paceline. Every error says what happened, why, and one fix that works.

    PacelineError
     +- ArgumentError    (TypeError)           a call with an argument that there is not
     +- ConfigError      (ValueError)          a setting, a config file or a flag
     +- WorldError       (RuntimeError)        ranks, devices, process groups
     +- CollectiveError  (RuntimeError)        ranks that disagree about a collective, or never enter it
     +- PlanError        (ValueError)          a plan that cannot work
     +- PrepareError     (TypeError)           an object that `prepare` cannot take, or that was not prepared
     +- DataError        (ValueError)          a loader, a sampler, a batch
     +- TrainError       (RuntimeError)        the loop itself: a non-finite loss, a step out of order
     +- CheckpointError  (RuntimeError)        saving and loading
     +- LaunchError      (RuntimeError)        starting and supervising processes
     +- TrackerError     (RuntimeError)        experiment trackers
     +- CompatError      (NotImplementedError) a name of another library that we do not carry

Each error has a `code`, a section with that name in `docs/errors.md`, and a test that triggers it.
Each class also inherits the exception of Python that fits, so that `except ValueError` in a script catches it too.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.base.wording import worded

# A message may quote a value from a file or a script, which can be of any length, so all texts are cut. The limit leaves
# room for a traceback that is given as a reason.
_MAX_TEXT = 4000
_MAX_REASONS = 40
MAX_PROBLEMS = 20
_MAX_VALUE = 200


def cut(text: str, length: int = _MAX_TEXT) -> str:
    """Shortens a text to about `length` characters: the result holds its beginning, how much was left out, and its end."""
    if len(text) <= length:
        return text
    end = length // 4
    beginning = length - end
    left_out = len(text) - length
    return f"{text[:beginning]} ... ({left_out:,} characters left out) ... {text[-end:]}"


class _ShortRepr(reprlib.Repr):
    """Writes the `repr` of a value without building more of a nested value than it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 8
        self.maxstring = self.maxlong = self.maxother = _MAX_VALUE

    def repr_int(self, x: int, level: int) -> str:
        """Writes an integer, and only the size of a very long one."""
        # Python raises a ValueError for an integer of more than 4300 digits, which would hide the error to be reported.
        if x.bit_length() > 4 * _MAX_VALUE:
            return f"<an integer of {x.bit_length():,} bits>"
        return repr(x)


_short = _ShortRepr()


def short_repr(value: object) -> str:
    """Returns `repr(value)` for a message, cut to about 200 characters, however large the value is."""
    return cut(_short.repr(value), _MAX_VALUE)


@dataclass(frozen=True)
class Problem:
    """Describes one thing that is wrong. Checks collect problems first, and raise all of them in one error.

    Each text is cut to a few thousand characters, so a value in it may be of any length. The fields are the arguments of
    `PacelineError`.
    """

    code: str
    what: str
    why: str | Sequence[str] = ()
    fix: str = ""

    def __post_init__(self) -> None:
        # A frozen dataclass refuses a normal assignment, even here.
        object.__setattr__(self, "what", cut(worded(self.what)))
        object.__setattr__(self, "fix", cut(worded(self.fix)))
        if isinstance(self.why, str):
            object.__setattr__(self, "why", cut(worded(self.why)))
            return
        given = list(self.why)
        reasons = [cut(worded(reason)) for reason in given[:_MAX_REASONS]]
        if len(given) > _MAX_REASONS:
            reasons.append(f"and {len(given) - _MAX_REASONS:,} more reasons")
        if reasons != given:
            object.__setattr__(self, "why", reasons)

    def __str__(self) -> str:
        reasons = [self.why] if isinstance(self.why, str) else list(self.why)
        lines = [f"{self.what}  [{self.code}]"]
        lines += [f"  why: {reason}" for reason in reasons if reason]
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class PacelineError(Exception):
    """The base class of all errors that Paceline raises on purpose.

    Args:
        code: stable name of the kind of error, such as `plan-size`; documented in `docs/errors.md`.
        what: what happened, in one sentence.
        why: the reason or reasons, each value with where it came from.
        fix: one thing to do that works.

    Attributes:
        problems: all problems that were found at once; one for most errors.
    """

    def __init__(self, code: str, what: str, why: str | Sequence[str] = (), fix: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(code, what, why, fix),)
        super().__init__(str(self.problems[0]))

    def __init_subclass__(cls) -> None:
        # With this name of the module, a traceback reads `paceline.PlanError: ...`. Classes that other modules define are
        # not public names of `paceline`, so unpickling would not find them there; they keep their module.
        if cls.__module__ == __name__:
            cls.__module__ = "paceline"

    @property
    def code(self) -> str:
        """Code of the first problem."""
        return self.problems[0].code

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> PacelineError:
        """Makes one error that holds all of `problems` (at least one); its message lists the first 20."""
        all_problems = tuple(problems)
        assert all_problems, "an error needs a problem"
        first = all_problems[0]
        error = cls(first.code, first.what, first.why, first.fix)
        if len(all_problems) > 1:
            error.problems = all_problems
            lines = [f"{number}. {problem}" for number, problem in enumerate(all_problems[:MAX_PROBLEMS], 1)]
            if len(all_problems) > MAX_PROBLEMS:
                lines.append(f"and {len(all_problems) - MAX_PROBLEMS:,} more problems.")
            error.args = ("\n".join([f"{len(all_problems):,} problems:", *lines]),)
        return error

    def __reduce__(self) -> tuple[object, ...]:
        # By default, an exception is unpickled with its message as the only argument, which this constructor does not take.
        return type(self).of, (self.problems,)


PacelineError.__module__ = "paceline"


class ArgumentError(PacelineError, TypeError):
    """A call with an argument that the function does not take."""


class ConfigError(PacelineError, ValueError):
    """A setting, a config file or a flag that cannot be used."""


class WorldError(PacelineError, RuntimeError):
    """Ranks, devices or a process group that cannot be had."""


class CollectiveError(PacelineError, RuntimeError):
    """Ranks that disagree about a collective operation, or never enter it."""


class PlanError(PacelineError, ValueError):
    """A plan that cannot work, found before anything is touched."""


class PrepareError(PacelineError, TypeError):
    """An object that `prepare` cannot take, or that should have been prepared and was not."""


class DataError(PacelineError, ValueError):
    """A loader, a sampler or a batch that cannot be used as it is."""


class TrainError(PacelineError, RuntimeError):
    """The training loop itself: a loss that is not finite, a call out of order."""


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint that cannot be written or read; whatever was saved before is untouched."""


class LaunchError(PacelineError, RuntimeError):
    """Processes that cannot be started, or that failed."""


class TrackerError(PacelineError, RuntimeError):
    """An experiment tracker that cannot be used."""


class CompatError(PacelineError, NotImplementedError):
    """A name of another library that Paceline does not carry; the message names the native way."""
