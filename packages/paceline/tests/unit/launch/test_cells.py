"""Finding the cell that has touched an accelerator, from the cells' text alone."""

from __future__ import annotations

import pytest

from paceline.launch.notebook_cells import search, who_touched


def no_import(statement: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("import torch\nmodel = net.cuda()", "model = net.cuda()"),
        ("x = torch.ones(1, device='cuda')", "x = torch.ones(1, device='cuda')"),
        ("accelerator = Accelerator()", "accelerator = Accelerator()"),
        ("%matplotlib inline\nx.to('cuda:1')", "x.to('cuda:1')"),
        ("torch.cuda.empty_cache()", "torch.cuda.empty_cache()"),
    ],
)
def test_by_its_text(cell: str, line: str) -> None:
    assert search(["import torch", cell], no_import) == f"cell [1]: `{line}`"


def test_what_stands_in_a_function_has_not_run() -> None:
    cells = ["def loop():\n    accelerator = Accelerator()\n    model.cuda()", "torch.cuda.is_available()"]
    assert search(cells, no_import) == ""


def test_an_import_that_does_it_is_found_by_trying() -> None:
    cells = ["import os", "import numpy as np\nfrom greedy import thing", "loop()"]
    assert search(cells, lambda statement: "greedy" in statement) == "cell [1]: `from greedy import thing`"


def test_nothing_is_said_where_nothing_was_touched() -> None:
    assert who_touched("cuda") == ""
