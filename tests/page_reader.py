"""Reads a page of the documentation as its user would: runs its code blocks in order, in the folder where it is started.

python tests/page_reader.py PAGE

```python                    runs; all of a page's in one session
```python title="train.py"   is written to a file that a later block must use; so is yaml, which has a title
```diff title="train.py"     is a whole file: `before.py` is written as it was, `train.py` as it becomes
```bash                      runs; it must end well
```text title="prints"       is what the block before it printed, exactly
<!-- not run: REASON -->     directly above a block: it is not run
"""

from __future__ import annotations

import io
import linecache
import re
import subprocess
import sys
import textwrap
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>```+)(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=indent)(?P=ticks) *$", re.MULTILINE | re.DOTALL
)
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, title, text, first line on the page, and why it is not run, if it is not."""

    language: str
    title: str
    text: str
    line: int
    skipped: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = re.search(r'title="([^"]*)"', rest)
        reason = NOT_RUN.search(text[: match.start()])
        found.append(
            Block(
                language=language,
                title=title[1] if title else "",
                text=textwrap.dedent(match["text"]),
                line=text.count("\n", 0, match.start()) + 2,
                skipped=reason["reason"] if reason else "",
            )
        )
    return found


def has_code(page: Path) -> bool:
    """Whether a page has a block that is run."""
    return any(block.language in ("python", "bash", "yaml") and not block.skipped for block in blocks(page))


class Reader:
    """Someone who types a page's blocks one after the other."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page = page
        self.folder = folder
        self.printed = ""
        self.main = ModuleType("__main__")

    def read(self, found: list[Block]) -> None:
        """Runs the blocks; raises at the first that fails."""
        sys.modules["__main__"] = self.main
        sys.path.insert(0, str(self.folder))
        for block in found:
            if block.language == "text" and block.title == "prints":
                expected, got = block.text.strip(), self.printed.strip()
                assert got == expected, f"line {block.line} promises\n{expected}\nbut this was printed:\n{got}"
            elif block.skipped or block.language not in ("python", "bash", "yaml", "diff"):
                continue
            elif block.language == "diff":
                self._diff(block)
            elif block.title:
                path = self.folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                self._python(block)
            else:
                self._bash(block)

    def _diff(self, block: Block) -> None:
        lines = block.text.splitlines()
        for name, others in (("before.py", "+"), (block.title, "-")):
            side = [line[1:] for line in lines if not line.startswith(others)]
            (self.folder / name).write_text("\n".join(side) + "\n", encoding="utf-8")

    def _python(self, block: Block) -> None:
        output = io.StringIO()
        name = str(self.page)
        linecache.checkcache(name)
        with redirect_stdout(output):
            exec(compile("\n" * (block.line - 1) + block.text, name, "exec"), self.main.__dict__)
        self.printed = output.getvalue()

    def _bash(self, block: Block) -> None:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], capture_output=True, text=True)
        assert done.returncode == 0, f"line {block.line}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        self.printed = done.stdout


if __name__ == "__main__":
    # A block may not warn, except of what a library will change some day.
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", DeprecationWarning)
    page = Path(sys.argv[1])
    Reader(page, Path.cwd()).read(blocks(page))
