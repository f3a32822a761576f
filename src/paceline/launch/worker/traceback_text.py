"""The traceback of an uncaught exception, as the person who wrote the script needs it.

An error that Paceline raises on purpose says what to do; the frames below the script's own line are ours and torch's,
and only debug mode shows them. Any other exception keeps every frame.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from types import TracebackType

from paceline.base.errors import ConfigError, PacelineError
from paceline.config.sources import resolve_run

_HERE = os.path.dirname(__file__)
# What torch says without a cause that the script's author can act on -> what stands below its message.
_EXPLAINED = {
    "got mixed torch.Tensor and DTensor": (
        "[model-copy] A plain tensor met a parameter of a prepared model, which is divided over ranks: for example that of a "
        "copy (an average of weights) which was made before `prepare`.\n"
        "  fix: prepare the copy too, `model, average, optimizer = accelerator.prepare(model, average, optimizer)`; or read "
        "whole values inside `with accelerator.full_parameters(model):`"
    ),
}
_INSIDE = frozenset({"paceline", "torch", *sys.stdlib_module_names})  # packages whose frames are nobody's own code


def traceback_text(error: BaseException) -> str:
    """The traceback as the script's own `sys.excepthook` tells it, without the frames of the launcher."""
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _HERE:
        trace = trace.tb_next
    error.__traceback__ = trace
    for message, explanation in _EXPLAINED.items():
        if message in str(error):
            error.add_note(explanation)
    if isinstance(error, PacelineError) and not _debugging():
        _shorten(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace  # as Python does: exit handlers look
    if getattr(sys.excepthook, "__module__", "").startswith("torch."):  # it marks each line with the rank
        return "".join(traceback.format_exception(error))
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        try:
            sys.excepthook(type(error), error, trace)
        except BaseException:  # a hook that fails must not hide what it was to tell
            traceback.print_exception(error, file=text)
    return text.getvalue() or "".join(traceback.format_exception(error))


def _shorten(error: PacelineError) -> None:
    """Ends the traceback at the script's own line; a cause with no line of the script is in the message already."""
    last = _last_own(error.__traceback__)
    if last is not None:
        last.tb_next = None
    cause = error.__cause__ or error.__context__
    if cause is not None and _last_own(cause.__traceback__) is None:
        error.__cause__ = None  # and no context either


def _last_own(trace: TracebackType | None) -> TracebackType | None:
    """The innermost frame of code that is neither ours, nor torch's, nor Python's; None where there is none."""
    last = None
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).split(".")[0] not in _INSIDE:
            last = trace
        trace = trace.tb_next
    return last


def _debugging() -> bool:
    try:
        return resolve_run({}).settings.debug
    except ConfigError:  # the settings are what is wrong, and the error at hand says so
        return False
