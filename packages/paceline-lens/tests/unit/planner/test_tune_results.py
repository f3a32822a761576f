"""The file of results of a tuning: what an interrupted search finds in it."""

from types import SimpleNamespace

import pytest

from paceline.base.errors import ConfigError
from paceline.launch.job import Target
from paceline_lens.tune.results import Results
from paceline_lens.tune.search import Candidate, Measured, Tuning


@pytest.fixture
def task(tmp_path):
    job = SimpleNamespace(target=Target("script", "train.py"), procs=1)
    device = SimpleNamespace(name="cpu")
    return SimpleNamespace(job=job, tuning=Tuning(results_dir=str(tmp_path)), decisions=(), device=device)


@pytest.mark.parametrize("num_bytes", [9, None], ids=["within a name", "after a brace"])
def test_a_line_that_was_cut_off_counts_as_missing(task, tmp_path, num_bytes):
    results = Results()
    assert results.open(task, None) == {}
    results.add(Candidate(0, 8, 1), Measured("measured", 1.0))
    results.add(Candidate(2, 8, 1), Measured("measured", 2.0))
    path = tmp_path / "results.jsonl"
    *lines, last = path.read_text().splitlines(keepends=True)
    if num_bytes is None:
        num_bytes = last.index("}") + 1
    path.write_text("".join(lines) + last[:num_bytes])
    assert Results().open(task, None) == {"z0_gas1_tmbspg8": Measured("measured", 1.0)}
    # What was cut off is gone, so that the next result begins a line of its own.
    assert len(path.read_text().splitlines()) == 2


def test_a_folder_that_cannot_be_written_to(task, tmp_path):
    task.tuning = Tuning(results_dir=str(tmp_path / "file" / "results"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"\[tune-results\]\n.*Not a directory"):
        Results().open(task, None)
