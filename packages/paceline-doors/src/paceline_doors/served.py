"""`Server`: answers Python's import system for the modules of one library, from one table of names.

import accelerate.utils             find_spec -> an empty `ServedModule`
from accelerate.utils import X      ServedModule.__getattr__("X")
                                      carried            our object, loaded now
                                      the library has it a stand-in whose use raises
                                      never existed      ImportError with the nearest name, AttributeError elsewhere
patch("accelerate.utils.other.X")   ServedModule.__setattr__: our modules that have imported X call the replacement too
importlib.metadata.version(...)     from `folder_for_children`, which stands in the path
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from paceline.base.lazy import is_imported_by_name
from paceline.base.parts import ADDED, missing
from paceline_doors.absent import absent
from paceline_doors.names import Names, folder_for_children

_ANY = importlib.metadata.DistributionFinder.Context()


class Server(importlib.metadata.DistributionFinder, Loader):
    """Finds and loads the modules of one library.

    Args:
        library: name of the library.
        names: Paceline's package that has the table of the library's names.

    Attributes:
        renamed: classes of ours that say they are the library's, each with the module that has it.
    """

    def __init__(self, library: str, names: Names) -> None:
        self.library = library
        self.modules = names.modules()
        self.carried = names.carried()
        self.renamed: dict[type, str] = {}
        self.about = {"__version__": names.VERSION, **names.ABOUT}
        self._names = names

    # -- modules ---------------------------------------------------------------------------------------------

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Returns the spec of a module of the library; None for modules of other libraries."""
        if name in self.modules:
            return ModuleSpec(name, self, origin=f"served by {__name__}", is_package=self.is_package(name))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Makes an empty module, whose names are looked up when they are first used."""
        module = ServedModule(spec.name, self)
        # The module needs `__file__`: tests find a library's scripts beside `inspect.getfile(accelerate.test_utils)`.
        package = folder_for_children(self.library).parent.joinpath(*spec.name.split(".")[1:])
        for file in (package / "__init__.py", package.with_suffix(".py")):
            if file.is_file():
                module.__file__ = str(file)
                break
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing, because the names are looked up later."""

    def is_package(self, name: str) -> bool:
        """Whether a module contains other modules."""
        return name == self.library or any(other.startswith(f"{name}.") for other in self.modules)

    def get_code(self, name: str) -> CodeType | None:
        """Returns the code that `python -m NAME` runs, which calls the module's `main` if it has one."""
        program = ""
        if "main" in self.modules[name]:
            program = f"import sys, {name}\nsys.exit({name}.main())"
        return compile(program, f"<{name}>", "exec")

    def look_up(self, module: str, name: str) -> Any:
        """Returns the object of a name.

        Raises:
            AttributeError: the library has no such name.
        """
        if f"{module}.{name}" in self.modules and name not in self.modules[module]:
            return importlib.import_module(f"{module}.{name}")
        if name in self.about:
            return self.about[name]
        if name not in self.modules[module]:
            return self._imported(module, name)
        # Most names mean the same object in every module. Where two modules differ, the table has their full names.
        target = self._target(module, name)
        if target is not None:
            our_module, _, attribute = target.partition(":")
            value = getattr(_imported(our_module, f"{module}.{name}"), attribute)
            if isinstance(value, type):
                self._name_after(module, name, value)
            return value
        return absent(f"{module}.{name}", *self._names.native_way(f"{module}.{name}"))

    def _target(self, module: str, name: str) -> str | None:
        """Returns the "module:attribute" of ours that stands for a name; None if it is not carried."""
        return self.carried.get(f"{module}.{name}", self.carried.get(name))

    def _name_after(self, module: str, name: str, value: type) -> None:
        """Lets a class of ours that stands for one of the library's say that it is that: a file into which it is pickled, such
        as the `training_args.bin` of a Trainer, is read where the real library is installed.
        """
        stands_for_it = value.__module__.startswith(f"{self._names.__name__}.") and value.__qualname__ == name
        if stands_for_it:
            self.renamed[value] = value.__module__
            value.__module__ = module

    def _imported(self, module: str, name: str) -> Any:
        """Returns what a module of the library imports from elsewhere: `patch("accelerate.state.os.environ")` looks it up.

        Raises:
            AttributeError: it imports no such module.
        """
        imported = self._names.imports().get(module, {}).get(name)
        if imported is None:
            raise AttributeError(self._no_such_name(module, name))
        if name == "logger":
            return logging.getLogger(module)
        return importlib.import_module(imported)

    def callers_of(self, module: str, name: str) -> list[ModuleType]:
        """Returns the modules of ours that may call what a script puts in the place of this name: its own, and the door's.

        Under the library's packages (`accelerate.utils`) an assignment only changes what the script itself looks up there.
        """
        target = self._target(module, name) if name in self.modules[module] else None
        if target is None or self.is_package(module):
            return []
        own_module = target.partition(":")[0]
        of_door = f"{self._names.__name__}."
        loaded = [other for other in list(sys.modules) if other == own_module or other.startswith(of_door)]
        return [sys.modules[other] for other in loaded]

    def names_of(self, module: str) -> list[str]:
        """Lists the names of a module, and the modules that are imported with it."""
        return sorted(self.modules[module].union(self._names.IMPORTED_WITH.get(module, "").split()))

    def _no_such_name(self, module: str, name: str) -> str:
        hint = ""
        near = difflib.get_close_matches(name, self.modules[module], 1, 0.6)
        if near:
            hint = f". Did you mean: {near[0]!r}?"
        return f"cannot import name {name!r} from {module!r} (served by Paceline as {self._names.VERSION}){hint}"

    # -- the installed distribution --------------------------------------------------------------------------

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = _ANY
    ) -> Iterable[importlib.metadata.Distribution]:
        """Finds the library's metadata after a script has removed the folder that contains it from its path."""
        if context.path is not sys.path or context.name not in (None, self.library):
            return []
        find = importlib.metadata.MetadataPathFinder.find_distributions
        # The normal finder returns it if a door is installed, or if the folder for child processes is in the path.
        if any(find(importlib.metadata.DistributionFinder.Context(name=self.library, path=sys.path))):
            return []
        folder = str(folder_for_children(self.library))
        return find(importlib.metadata.DistributionFinder.Context(name=self.library, path=[folder]))


class ServedModule(ModuleType):
    """A module of the library, whose attributes come from the table of names."""

    _replaced: dict[str, Any]  # our functions, by name, in whose place a script has put others

    def __init__(self, name: str, server: Server) -> None:
        super().__init__(name, f"{name}, served by Paceline.")
        self.__dict__["_server"] = server
        self.__dict__["_replaced"] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # `from accelerate.utils import *` reads it
            return [name for name in dir(self) if not name.startswith("_")]
        if name.startswith("__") and name not in self._server.about:
            # The message is Python's own, plus a note: who prints `accelerate.__file__` wants to know what is imported.
            raise AttributeError(f"module {self.__name__!r} (served by Paceline) has no attribute {name!r}")
        try:
            value = self._server.look_up(self.__name__, name)
        except AttributeError as error:
            # `__import__("accelerate.utils", fromlist=[""])` asks for an attribute without a name, and expects no error.
            if name and is_imported_by_name(sys._getframe(1)):
                raise ImportError(str(error), name=self.__name__) from None
            raise
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # `import accelerate.utils.tqdm` would put that module in place of the function of the same name.
        if isinstance(value, ServedModule) and name in self._server.modules[self.__name__]:
            return
        callers = self._server.callers_of(self.__name__, name)
        if callers:
            current = getattr(self, name)
            self._replaced.setdefault(name, current)
            _put_in_place(name, current, value, callers)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        # `unittest.mock.patch` ends with this, and expects that the name is there again.
        if name in self._replaced:
            callers = self._server.callers_of(self.__name__, name)
            _put_in_place(name, self.__dict__[name], self._replaced.pop(name), callers)
        super().__delattr__(name)

    def __dir__(self) -> Iterator[str]:
        return iter(self._server.names_of(self.__name__))


def _put_in_place(name: str, current: object, value: object, callers: Sequence[ModuleType]) -> None:
    """Puts a value in place of a function in those modules of ours that have it by this name."""
    # Classes stay: our modules ask `isinstance` of them.
    if isinstance(current, type) or not callable(current):
        return
    for module in callers:
        if vars(module).get(name) is current:
            setattr(module, name, value)


def _imported(module: str, name: str) -> ModuleType:
    """Imports the module of ours that has a name of a library.

    Raises:
        ConfigError: `part-missing`, where it needs a part of Paceline that is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        extra = (error.name or "").partition(".")[0].removeprefix("paceline_")
        if extra not in ADDED:
            raise
        raise missing(extra, f"what stands for {name} is", f"{module} needs it") from None
