"""Makes a notebook of a script whose cells begin with `# %%` (code) or `# %% [markdown]`.

python examples/to_notebook.py examples/notebook_loop/loop.py        writes loop.ipynb beside it
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

MARK = "# %%"


def notebook(script: str) -> nbformat.NotebookNode:
    """The notebook of a script's text, with empty outputs; the same text gives the same notebook."""
    cells = []
    for number, part in enumerate(script.split(f"{MARK}")[1:]):
        kind, _, text = part.partition("\n")
        if kind.strip() == "[markdown]":
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.strip().splitlines())
            cells.append(new_markdown_cell(text, id=f"cell-{number}"))
        else:
            cells.append(new_code_cell(text.strip(), id=f"cell-{number}"))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        nbformat.write(notebook(path.read_text(encoding="utf-8")), path.with_suffix(".ipynb"))
        print(f"wrote {path.with_suffix('.ipynb')}")
