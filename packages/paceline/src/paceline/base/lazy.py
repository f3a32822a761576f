"""Imports the public names of a package when they are first used (PEP 562), and imports with less work."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any


def lazy_names(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a module's `__getattr__`, which imports a name at its first use.

    The function raises ConfigError `part-missing`, for a name of a part that is not installed.

    Args:
        package: name of the package whose names are lazy.
        where: public name -> the module that defines it, which may be one of another part.
    """

    def load(name: str) -> Any:
        if name not in where:
            raise _unknown(package, name, list(where))
        part, _, _ = where[name].partition(".")
        if part.startswith("paceline_"):
            from paceline.base.parts import require  # `import paceline` does not need it

            require(part.removeprefix("paceline_"), f"`{package}.{name}` is", f"{where[name]} defines it")
        with _interrupt_after_import(), fast_imports():
            value = getattr(import_module(where[name]), name)
        # The name is an attribute of the package from now on, so Python does not call this function for it again.
        setattr(sys.modules[package], name, value)
        return value

    return load


def _unknown(package: str, name: str, names: Sequence[str]) -> Exception:
    """Returns the error about a name that a package does not have."""
    # Python adds the name that was probably meant when it prints an AttributeError.
    if not is_imported_by_name(sys._getframe(2)):
        return AttributeError(f"module {package!r} has no attribute {name!r}")
    # Imported here: a program that asks for no wrong name waits for it no longer.
    from difflib import get_close_matches

    close = get_close_matches(name, names, 1, 0.75)
    if not close or close[0].lower() == name:  # `paceline.accelerator` is a module
        return AttributeError(f"module {package!r} has no attribute {name!r}")
    return ImportError(f"cannot import name {name!r} from {package!r}. Did you mean: {close[0]!r}?", name=package)


def is_imported_by_name(caller: FrameType) -> bool:
    """Whether a module's `__getattr__` was called for `from package import Name`, by the frame of its caller.

    Python replaces an AttributeError there by an error of its own, which (before 3.12) names nothing that was meant.
    """
    return caller.f_code.co_name == "_handle_fromlist"


@contextmanager
def _interrupt_after_import() -> Iterator[None]:
    """Raises KeyboardInterrupt at the end of an import if Ctrl-C was pressed during it; a second Ctrl-C raises it at once.

    Python would raise it at any line, and modules such as torch's catch every exception at some of them: of 60 scripts that
    got SIGINT while they imported torch, 12 went on, and 2 failed with another error.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    was_interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        if was_interrupted:
            signal.default_int_handler(number, frame)
        was_interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        # A module may have set a handler of its own meanwhile.
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if was_interrupted:
        raise KeyboardInterrupt


@contextmanager
def fast_imports() -> Iterator[None]:
    """Keeps garbage collection off in a `with` block that imports modules.

    Imports only add objects. The collector looks through them again and again, which takes a fifth of the time of importing
    torch.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
