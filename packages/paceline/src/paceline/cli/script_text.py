"""What the text of a script says about the arguments that it reads, without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# A script whose own files have none of these words reads no arguments.
_READERS = re.compile(
    r"\b(?:argv|orig_argv|parse_args|parse_known_args|add_argument|argparse|ArgumentParser|optparse|getopt|click|typer|tyro|"
    r"fire|hydra|absl|docopt|OmegaConf|"
    r"from_cli|draccus|jsonargparse|simple_parsing|chz|cyclopts|tap|\w*ArgumentParser|LightningCLI|\w*_cli)\b"
)
# With these the names of arguments stand in other files, or in text that no rule could read.
_UNREADABLE = re.compile(r"\b(?:HfArgumentParser|LightningCLI|docopt|jsonargparse|OmegaConf|from_cli|hydra)\b")
_MOST_FILES = 50


def reads_arguments(script: str) -> bool:
    """Returns whether a script reads any argument; True where that cannot be known, as for a module or a program."""
    texts = _texts(script)
    return not texts or any(_READERS.search(text) for text in texts)


def reads(script: str, flag: str) -> bool:
    """Returns whether a script reads a flag, such as "--zero"; True where that cannot be known."""
    if not reads_arguments(script):
        return False
    texts = _texts(script)
    if not texts or any(_UNREADABLE.search(text) for text in texts):
        return True
    wanted = _plain(flag)
    for text in texts:
        for name in _names(text):
            # argparse takes the beginning of a flag for the flag: `--zero` is also `--zero-stage`.
            if _plain(name) == wanted or (name.startswith("--") and _plain(name).startswith(wanted)):
                return True
    return False


def _plain(name: str) -> str:
    return name.strip("-=: ").replace("-", "_").lower()


def _names(text: str) -> Iterator[str]:
    """Yields what may name an argument: constants of text, parameters of functions, and fields of classes."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _texts(script: str) -> list[str]:
    """Returns the text of a script and of the files beside it that it imports; [] for what is no file of Python."""
    folder = Path(script).parent
    files = [Path(script)]
    texts: list[str] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            if not texts:
                return []
            continue
        texts.append(text)
        for name in re.findall(r"^\s*(?:from|import)\s+\.*([\w.]+)", text, re.MULTILINE):
            path = folder.joinpath(*name.split("."))
            for candidate in (path.with_suffix(".py"), path / "__init__.py"):
                if candidate.is_file() and candidate not in files and len(files) < _MOST_FILES:
                    files.append(candidate)
    return texts
