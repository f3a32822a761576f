"""Names the test files that a change can reach: `python tests/choose_tests.py` prints them, one a line, for pytest; no line
stands for all.

The change is what differs from the last commit that passed the whole suite (`dev/whole-run`, which `make test-all` writes),
with what is not committed yet. A file of tests is reached by

- itself, and by the files of tests/ that it imports;
- each of our modules that it imports, those that they import (in functions, too), and those that they name by text, as tables
  of lazy names and `pyproject.toml` do;
- an entry point of a part beside the core, if the test says its name: `slurm`, `deepspeed`, `watch`;
- pages and examples, for the tests in tests/docs, page by page; their long cases, which `make test-all` leaves out, and the
  built site, too;
- files that are not Python, in the folder of a file that it needs or below;
- all files below its own folder that no test names.

Texts of programs that a test starts count as its own imports. Some files always run: `ALWAYS`. A change of anything else
(`conftest.py`, `pyproject.toml`, `constraints.txt`, ...) reaches all of them.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

from long_cases import LONG
from page_reader import has_code

ROOT = Path(__file__).parents[1]
WHOLE_RUN = ROOT / "dev" / "whole-run"
CORE = "paceline"
# They cost little, or look at all of the text; and programs that are drawn anew each day.
ALWAYS = (
    "tests/shape/",
    "tests/loops/",
    "packages/paceline/tests/ranks/test_parity.py",
    "tests/docs/test_quickstart.py",
)
# What no test reads, or those of tests/shape alone. `dev/LOG` and reports are written after the tests.
UNTESTED = (
    "dev/LOG/",
    "dev/reports/",
    "dev/coverage_by_package.py",
    "dev/figures.py",
    "dev/from_source.py",
    "dev/mutants.py",
    "dev/replay.py",
    "dev/test_part.py",
    "dev/whole-run",
    "benchmarks/reports/",
    "CHANGELOG.md",
    "SECURITY.md",
    ".github/",
    ".gitignore",
    "tests/README.md",
)
PAGES = ("docs/", "examples/", "README.md", "CONTRIBUTING.md", "mkdocs.yml")
PAGE_TESTS = "tests/docs/"
PAGE_CASES = "tests/docs/test_code_blocks.py"
# File of tests -> the beginning of what it reads: its long cases run where that has changed.
LONG_WHERE_CHANGED = {
    "tests/docs/test_examples.py": "examples/",
    "tests/docs/test_chaos.py": "examples/",
    "tests/docs/test_site.py": "docs/",
    "tests/shape/test_types.py": "packages/",
}
# A command of ours: called, started by its name, or by a helper that is told the words after it.
_COMMAND = re.compile(r"\bmain\(\[|-m\W+paceline|paceline (launch|plan|test|env)|\"paceline\"")
# "paceline.optim.clip", "paceline_large.offload.offload:STRATEGY"
_MODULE = re.compile(r"[a-z_][a-z_0-9]*(\.[a-z_][a-z_0-9]*)+(:\w+)?")


# -- what imports what -------------------------------------------------------------------------------------------------


def names_of(node: ast.AST, package: str) -> list[str]:
    """Dotted names that an import statement may load; `from a import b` gives `a.b`, which may be a name in `a`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *([base] if base else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    return []


class Text(NamedTuple):
    """What counts of a file of Python. The tree is not kept: a million nodes would be looked at in each collection of garbage.

    Attributes:
        imports: import statements anywhere, in functions and for type checkers, too.
        texts: names of modules, and programs that a test writes down.
    """

    imports: list[ast.AST]
    texts: list[str]

    def imported_names(self, package: str) -> Iterator[str]:
        """Dotted names that the file, in a package, may load."""
        for node in self.imports:
            yield from names_of(node, package)


def text_of(tree: ast.AST) -> Text:
    """Reads both in one pass, which is short because of what it leaves out."""
    found = Text([], [])
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        kind = type(node)
        if kind is ast.Constant:
            if type(node.value) is str:
                found.texts.append(node.value)
        elif kind is ast.Import or kind is ast.ImportFrom:
            found.imports.append(node)
        elif kind is not ast.Name:
            for value in node.__dict__.values():
                if type(value) is list:
                    waiting += [each for each in value if isinstance(each, ast.AST)]
                elif isinstance(value, ast.AST):
                    waiting.append(value)
    return found


def names_in_program(text: str) -> Iterator[str]:
    """What a text imports, if it is a program."""
    if "import " not in text:
        return
    try:
        yield from text_of(ast.parse(dedent(text))).imported_names("")
    except (SyntaxError, ValueError):
        for line in re.finditer(r"(?:from|import)\s+([\w.]+)", text):
            yield line[1]


class Sources:
    """All modules of all parts, and which of them each one needs.

    Attributes:
        files: dotted name -> its file.
        needs: dotted name -> the modules that it imports or names.
        entry_points: module that reads a group of entry points -> [(name, module)] of that group.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.files: dict[str, Path] = {}
        for source in sorted(root.glob("packages/*/src")):
            for path in source.rglob("*.py"):
                name = ".".join(path.relative_to(source).with_suffix("").parts)
                self.files[name.removesuffix(".__init__")] = path
        self.facade = _lazy_names(self.files[CORE])
        self.needs: dict[str, set[str]] = {}
        self.entry_points: dict[str, list[tuple[str, str]]] = {}
        groups = _entry_points(root)
        for name, path in self.files.items():
            text = path.read_text(encoding="utf-8")
            found = text_of(ast.parse(text))
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            # The facade's table of names is read by the name that is used, so that not every program needs everything.
            self.needs[name] = set() if name == CORE else self.modules(_named(found, package))
            for group, points in groups.items():
                if f'"{group}"' in text:
                    self.entry_points.setdefault(name, []).extend(points)

    def modules(self, names: Iterable[str]) -> set[str]:
        """The modules that dotted names lie in, with the packages above, whose `__init__` is run too."""
        found = set()
        for name in names:
            rest = self._public(name)
            while rest and rest not in self.files:
                rest = rest.rpartition(".")[0]
            while rest:
                found.add(rest)
                rest = rest.rpartition(".")[0]
        return found

    def _public(self, name: str) -> str:
        """The module that has a public name of the facade: `paceline.Accelerator` -> `paceline.accelerator`."""
        if name == CORE:
            return self.facade["Accelerator"]
        return self.facade.get(name.removeprefix(f"{CORE}."), name)

    def reached(self, modules: Iterable[str], words: frozenset[str]) -> set[str]:
        """The modules that are needed by some, directly or not.

        Args:
            modules: dotted names.
            words: those of the tests; an entry point of a part beside the core counts if its name is among them.
        """
        seen: set[str] = set()
        waiting = list(modules)
        while waiting:
            module = waiting.pop()
            if module in seen:
                continue
            seen.add(module)
            waiting += self.needs.get(module, ())
            for name, target in self.entry_points.get(module, ()):
                if target.partition(".")[0] == CORE or words.issuperset(re.findall(r"\w+", name.lower())):
                    waiting += self.modules([target])
        return seen


def _named(found: Text, package: str) -> Iterator[str]:
    yield from found.imported_names(package)
    for text in found.texts:
        if _MODULE.fullmatch(text):
            yield text.partition(":")[0]


def _entry_points(root: Path) -> dict[str, list[tuple[str, str]]]:
    """Group -> [(name, module)], of all parts."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(root.glob("packages/*/pyproject.toml")):
        declared = tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("entry-points", {})
        for group, points in declared.items():
            groups.setdefault(group, []).extend((name, value.partition(":")[0]) for name, value in points.items())
    return groups


def _lazy_names(facade: Path) -> dict[str, str]:
    """The table of lazy names of the facade: name -> module."""
    for node in ast.parse(facade.read_text(encoding="utf-8")).body:
        is_table = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_WHERE"
        if is_table:
            return ast.literal_eval(node.value)
    raise SystemExit(f"{facade} has no table _WHERE any more: change tests/choose_tests.py, too")


# -- what a file of tests needs ----------------------------------------------------------------------------------------


class FilesOfTests:
    """The files of tests of all parts, and what each needs."""

    def __init__(self, sources: Sources, root: Path = ROOT) -> None:
        self.sources = sources
        self.root = root
        self.files = sorted([*root.glob("tests/**/test_*.py"), *root.glob("packages/*/tests/**/test_*.py")])
        # `import parity_models` and `from hosts.network import Network`: tests/ is on the path.
        self._helpers: dict[str, Path] = {}
        # Many files share their helpers, each of which is read once.
        self._direct: dict[Path, list[Path]] = {}
        for path in root.glob("tests/**/*.py"):
            self._helpers[".".join(path.relative_to(root / "tests").with_suffix("").parts)] = path

    def needs(self, file: Path) -> set[str]:
        """The files, relative to the root, that can change what a file of tests finds."""
        files = self.with_helpers(file)
        names: set[str] = set()
        words: set[str] = set()
        for path in files:
            words |= _words(path)
            names |= self._names(path)
        # A command of ours is started by its name, or by a helper that is told the words after it.
        if re.search(
            r"\bmain\(\[|-m\W+paceline|paceline (launch|plan|test|env)|\"paceline\"", "".join(_read(f) for f in files)
        ):
            names.add(f"{CORE}.cli.main")
        modules = self.sources.reached(self.sources.modules(names), frozenset(words))
        found = {self.sources.files[module] for module in modules} | files
        return {str(path.relative_to(self.root)) for path in found}

    def with_helpers(self, file: Path) -> set[Path]:
        """A file and those of tests/ that it imports, directly or not, with the scripts that it names."""
        found: set[Path] = set()
        waiting = [file]
        while waiting:
            path = waiting.pop()
            if path in found:
                continue
            found.add(path)
            if path not in self._direct:
                self._direct[path] = self._helpers_of(path)
            waiting += self._direct[path]
        return found

    def _helpers_of(self, path: Path) -> list[Path]:
        """The files of tests/ that one imports or names itself."""
        helpers = []
        found = _text(path)
        for name in found.imported_names(""):
            while name:
                if name in self._helpers:
                    helpers.append(self._helpers[name])
                    break
                name = name.rpartition(".")[0]
        named_files = [path.parent / text for text in found.texts if re.fullmatch(r"[\w/]+\.py", text)]
        helpers += [script for script in named_files if script.is_file()]
        return helpers + self._scripts_beside(path, found)

    @staticmethod
    def _scripts_beside(path: Path, found: Text) -> list[Path]:
        """The programs of a folder `scripts` that a file speaks of."""
        folder = path.parent / "scripts"
        speaks_of_it = "scripts" in found.texts
        return sorted(folder.rglob("*.py")) if speaks_of_it else []

    @staticmethod
    @cache
    def _names(path: Path) -> set[str]:
        found = _text(path)
        names = set(_named(found, ""))
        for text in found.texts:
            names |= set(names_in_program(text))
        # Other libraries' names are ours here.
        for library in ("accelerate", "deepspeed"):
            if any(name.partition(".")[0] == library for name in names):
                names.add(f"paceline_{library}")
                names |= {f"paceline_{name}" for name in names if name.startswith(f"{library}.")}
        return names


@cache
def _words(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", _read(path).lower()))


@cache
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _text(path: Path) -> Text:
    return text_of(ast.parse(_read(path)))


# -- the change --------------------------------------------------------------------------------------------------------


def git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def changed_since(commit: str) -> set[str]:
    """Files that differ from a commit, with those that git does not know yet."""
    return {*git("diff", "--name-only", commit), *git("ls-files", "--others", "--exclude-standard")}


def chosen(changed: set[str], needs: Mapping[str, set[str]]) -> list[str] | None:
    """The tests that a change can reach.

    Args:
        changed: paths relative to the root.
        needs: file of tests -> the files that it needs.

    Returns:
        Arguments for pytest; None for all tests.
    """
    changed = {path for path in changed if not path.startswith(UNTESTED) and not _is_of_a_package(path)}
    known = {path for paths in needs.values() for path in paths}
    pages = {path for path in changed if path.startswith(PAGES)}
    unknown = changed - pages - known
    # What a test reads beside its file, or a module beside its own: tables, pages, programs.
    folders = {_nearest_folder(path, known) for path in unknown}
    is_beside = all(path.startswith("tests/") or "/tests/" in path or "/src/" in path for path in unknown)
    if "tests" in folders or not is_beside:
        return None
    words = []
    for file, needed in needs.items():
        is_reached = file.startswith(ALWAYS) or bool(needed & changed)
        is_reached |= any(path.startswith(f"{folder}/") for folder in folders for path in needed)
        # What is recorded, and the programs that read it, lie below the tests: `compat/reference`.
        is_reached |= any(path.startswith(f"{Path(file).parent}/") for path in unknown)
        if file.startswith(PAGE_TESTS) and not file.startswith(ALWAYS):
            is_reached = bool(pages) or file in changed
        if not is_reached:
            continue
        if file in LONG_WHERE_CHANGED and any(path.startswith(LONG_WHERE_CHANGED[file]) for path in changed):
            words += [case for case in LONG if case.startswith(f"{file}::")]
        if file == PAGE_CASES and file not in changed:
            words += [f"{file}::test_a_page_runs[{page}]" for page in sorted(pages) if _has_code(page)]
        else:
            words.append(file)
    return words


def _nearest_folder(path: str, known: set[str]) -> str:
    """The nearest folder around a file in which, or below which, there is one that tests need: of `page/page.js`, `watch`."""
    folder = Path(path).parent
    while not any(each.startswith(f"{folder}/") for each in known):
        folder = folder.parent
        if folder == Path():
            return ""
    return str(folder)


def _is_of_a_package(path: str) -> bool:
    """Whether a file is the first page of a part, which goes into its wheel."""
    return path.startswith("packages/") and path.endswith("/README.md")


def _has_code(page: str) -> bool:
    path = ROOT / page
    is_read = page == "README.md" or (page.startswith("docs/") and page.endswith(".md"))
    return is_read and path.exists() and has_code(path)


def main() -> None:
    commit = WHOLE_RUN.read_text(encoding="utf-8").strip()
    try:
        changed = changed_since(commit)
    except subprocess.CalledProcessError:
        print(
            f"all tests: {commit[:8]}, the last commit that passed all of them, is not in this clone", file=sys.stderr
        )
        return
    tests = FilesOfTests(Sources())
    needs = {str(file.relative_to(ROOT)): tests.needs(file) for file in tests.files}
    words = chosen(changed, needs)
    if words is None:
        print(f"all tests: files that concern them all have changed since {commit[:8]}", file=sys.stderr)
        return
    files = {word.partition("::")[0] for word in words}
    print(
        f"{len(files)} of {len(needs)} files of tests: what {len(changed)} changed files can reach since {commit[:8]}, "
        "the last commit that passed all of them. `make test-all` runs all.",
        file=sys.stderr,
    )
    print("\n".join(words))


if __name__ == "__main__":
    main()
