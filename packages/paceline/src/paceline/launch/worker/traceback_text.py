"""Writes the traceback of an uncaught exception for the author of the script; each worker calls it before it ends.

An error of Paceline says what to do. Below the script's own line there are only frames of Paceline and torch, which are shown
in debug mode only. Any other exception keeps all its frames.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from types import TracebackType

from paceline.base.errors import ConfigError, PacelineError, Problem
from paceline.base.parts import PACKAGES
from paceline.config.sources import resolve_run

_HERE = os.path.dirname(__file__)
# Errors of DTensor do not say what to do: this stands below their messages.
_OPERATION = Problem(
    "shard-operation",
    "The operation needs a whole parameter, and this one is divided over ranks.",
    fix="read and write whole values inside `with accelerator.full_parameters(model, writeback=True):`",
)
# They answer operators on divided tensors, in the script's own lines, too.
_ANSWERS = ("paceline.parallel.whole_answers", "paceline.parallel.mixtures", "paceline.torch_internals.dtensor")
# In passes and steps the parameters are not those that the script has chosen to read or write.
_PASSES = (*PACKAGES, "torch.nn.modules.", "torch.autograd", "torch.optim")
_INSIDE = frozenset({*PACKAGES, "torch", *sys.stdlib_module_names})  # packages whose frames are not the user's code


def traceback_text(error: BaseException) -> str:
    """Returns the traceback as the script's own `sys.excepthook` prints it, without the frames of the launcher."""
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _HERE:
        trace = trace.tb_next
    error.__traceback__ = trace
    explanation = _explanation(error)
    if explanation is not None:
        error.add_note(str(explanation))
    if isinstance(error, PacelineError) and not _debugging():
        _shorten(error)
    # Python sets these three too, and exit handlers read them.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    # The hook of torch would begin each line with the rank, as the launcher does.
    if getattr(sys.excepthook, "__module__", "").startswith("torch."):
        return "".join(traceback.format_exception(error))
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        try:
            sys.excepthook(type(error), error, trace)
        except BaseException:
            # A hook that fails must not hide the error.
            traceback.print_exception(error, file=text)
    return text.getvalue() or "".join(traceback.format_exception(error))


def _explanation(error: BaseException) -> Problem | None:
    """Returns what to do about an error of DTensor; None for any other."""
    if isinstance(error, PacelineError):
        return None
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [module for module in modules if module not in _ANSWERS]
    is_of_dtensor = bool(modules) and modules[-1].startswith("torch.distributed.tensor")
    # An operator that is not torch's own.
    if "got mixed torch.Tensor and DTensor" in str(error):
        return _OPERATION
    if not is_of_dtensor:
        return None
    if any(module.startswith(_PASSES) for module in modules):
        return None
    return _OPERATION


def _shorten(error: PacelineError) -> None:
    """Ends the traceback at the script's own line. A cause without a line of the script is removed: the message says it."""
    last = _last_own(error.__traceback__)
    if last is not None:
        last.tb_next = None
    cause = error.__cause__ or error.__context__
    if cause is not None and _last_own(cause.__traceback__) is None:
        error.__cause__ = None  # this hides the context too


def _last_own(trace: TracebackType | None) -> TracebackType | None:
    """Returns the innermost frame that is not of Paceline, torch or Python; None if there is none."""
    last = None
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in _INSIDE:
            last = trace
        trace = trace.tb_next
    return last


def _debugging() -> bool:
    try:
        return resolve_run().settings.debug
    except ConfigError:
        return False  # the settings are wrong, which is probably the error that is shown
