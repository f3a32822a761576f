"""`paceline checkpoint`: what lies in a folder, whether it is whole, and how two checkpoints differ."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from paceline.base.errors import CheckpointError
from paceline.checkpoint import Checkpointer, RunState, TrainState, save_model
from paceline.checkpoint.store import store_for
from paceline.cli.main import main

PLAN = json.dumps({"layout": {"replicate": 2, "tp": 2}, "precision": "bf16", "zero": 0, "accumulate": 4})


def save(path, *, step: int = 3, shift: float = 0.0, width: int = 2, frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1), *([nn.Linear(1, 1)] * frozen))
    with torch.no_grad():
        model[1].bias += shift
    state = TrainState(models={"model": model}, run=RunState(step))
    Checkpointer().save(path, state, plan_json=PLAN)
    return model


@pytest.fixture
def run_folder(tmp_path):
    """A run's folder: two sound checkpoints, one that lost a file, one whose manifest was cut, one unfinished save."""
    folder = tmp_path / "run" / "checkpoints"
    for number in (0, 1, 2, 10):
        save(folder / f"checkpoint_{number}", step=3 * number)
    (folder / "checkpoint_1" / "__0_0.distcp").unlink()
    (folder / "checkpoint_2" / "manifest.json").write_text('{"format": "pace')
    (folder / ".checkpoint_11.partial-00ff").mkdir()
    (folder / ".checkpoint_11.partial-00ff" / "__0_0.distcp").write_bytes(b"x" * 100)
    (folder / "notes.txt").write_text("mine")
    return tmp_path / "run"


def test_ls(run_folder, capsys):
    assert main(["checkpoint", "ls", str(run_folder)]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith("run/checkpoints") and columns.split()[:3] == ["name", "step", "age"]
    names = [row.split()[0] for row in rows]
    assert names == ["checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_10", ".checkpoint_11.partial-00ff"]
    assert "replicate 2 x tp 2, bf16, accumulate 4" in rows[0] and rows[0].endswith("complete")
    assert "s ago" in rows[0] and "KiB" in rows[0]
    assert "damaged: __0_0.distcp" in rows[1] and "is missing" in rows[1]
    assert "manifest.json cannot be read" in rows[2]
    assert rows[4].endswith("unfinished") and "100 B" in rows[4]
    main(["checkpoint", "ls", str(run_folder / "checkpoints"), "--json"])
    answer = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [entry["state"] for entry in answer] == ["complete", "damaged", "damaged", "complete", "unfinished"]
    assert answer[3]["step"] == 30 and answer[3]["bytes"] > 500 and answer[4]["step"] is None
    main(["checkpoint", "ls", str(run_folder / "checkpoints" / "checkpoint_10")])
    assert capsys.readouterr().out.count("complete") == 1


def test_show(run_folder, capsys):
    folder = str(run_folder / "checkpoints" / "checkpoint_10")
    assert main(["checkpoint", "show", folder]) == 0
    printed = capsys.readouterr().out
    assert (
        "step   30" in printed and "replicate 2 x tp 2" in printed and "state.json" in printed and "crc32:" in printed
    )
    assert main(["checkpoint", "show", folder, "--tensors", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tensors"]["models/model/0.weight"] == {"shape": [2, 3], "dtype": "float32"}
    assert answer["plan"]["precision"] == "bf16" and answer["step"] == 30


def test_verify_names_the_damaged_file(run_folder, capsys):
    folder = run_folder / "checkpoints"
    assert main(["checkpoint", "verify", str(folder / "checkpoint_0")]) == 0
    assert capsys.readouterr().out == "checkpoint_0: sound\n"
    shard = folder / "checkpoint_0" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert main(["checkpoint", "verify", str(run_folder)]) == 1
    printed = capsys.readouterr().out
    assert "checkpoint_0: damaged\n  __0_0.distcp" in printed and "its checksum should be" in printed
    assert "checkpoint_10: sound" in printed and ".checkpoint_11.partial-00ff: unfinished" in printed


def test_diff(tmp_path, capsys):
    model = save(tmp_path / "a")
    save(tmp_path / "b", shift=0.25, step=4)
    save(tmp_path / "wider", width=4, frozen=True)
    a, b, wider = (str(tmp_path / name) for name in ("a", "b", "wider"))
    assert main(["checkpoint", "diff", a, a]) == 0
    assert capsys.readouterr().out.startswith("the same: ")

    assert main(["checkpoint", "diff", a, b, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    (bias,) = answer["tensors"]
    assert bias["name"] == "models/model/1.bias" and bias["count"] == 1
    assert bias["largest"] == pytest.approx(0.25) and bias["relative"] == pytest.approx(
        0.25 / abs(model[1].bias.item())
    )
    assert answer["values"] == {"run/step": {"a": 3, "b": 4}} and answer["only"] == {"a": [], "b": []}
    assert main(["checkpoint", "diff", a, b, "--atol", "1"]) == 0

    assert main(["checkpoint", "diff", a, wider]) == 1
    printed = capsys.readouterr().out
    assert f"only in {wider}: 2 tensors" in printed and "shape [2, 3] and [4, 3]" in printed

    save_model(model, str(tmp_path / "weights"))
    assert main(["checkpoint", "diff", a, str(tmp_path / "weights")]) == 0
    assert main(["checkpoint", "diff", str(tmp_path / "weights"), b]) == 1
    assert "1 of 4 differ" in capsys.readouterr().out
    save_model(model.half(), str(tmp_path / "weights"))
    assert main(["checkpoint", "diff", a, str(tmp_path / "weights"), "--atol", "1e-3"]) == 1, "the dtype differs"
    assert "float32 and float16" in capsys.readouterr().out


def test_values_that_are_not_numbers(tmp_path):
    from paceline_lens.checkpoint.difference import _compare

    a = torch.tensor([1.0, float("nan"), float("inf")])
    assert _compare("x", a, a.clone(), 0.0) is None
    other = _compare("x", a, torch.tensor([1.0, 2.0, float("inf")]), 10.0)
    assert other is not None and other.largest == float("inf") and other.count == 1
    assert _compare("x", torch.empty(0), torch.empty(0), 0.0) is None
    assert _compare("x", torch.tensor(2), torch.tensor(3), 0.0).largest == 1.0
    assert _compare("x", torch.tensor([True, False]), torch.tensor([True, True]), 0.0).count == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["ls", "file"], "checkpoint-none]\n  why: it is a file, not a folder"),
        (["ls", "empty"], "checkpoint-none"),
        (["verify", "empty"], "checkpoint-none"),
        (["show", "empty"], "checkpoint-none"),
        (["diff", "empty", "empty"], "checkpoint-none"),
        (["ls", "absent"], "checkpoint-missing"),
        (["show", "absent"], "checkpoint-missing"),
        (["ls", "nothing://nowhere/x"], "checkpoint-store"),
    ],
)
def test_folders_that_are_none(tmp_path, monkeypatch, capsys, words, code):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", *words]) == 1
    assert f"[{code}" in capsys.readouterr().err


def test_a_group_lists_its_commands_and_knows_no_others(capsys):
    assert main(["checkpoint"]) == 0
    assert "checkpoint verify" in capsys.readouterr().out
    assert main(["checkpoint", "lss"]) == 2
    assert "write `paceline checkpoint ls`" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["ls"], ["show"], ["verify"]])
def test_looking_needs_no_torch(tmp_path, words):
    save(tmp_path / "checkpoint_0")
    code = (
        "import sys; from paceline.cli.main import main; "
        f"main(['checkpoint', *{words!r}, {str(tmp_path / 'checkpoint_0')!r}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_prune(run_folder, capsys):
    folder = run_folder / "checkpoints"
    whole = {"checkpoint_0", "checkpoint_1", "checkpoint_10"}
    names = lambda: {entry.name for entry in folder.glob("checkpoint_*")}  # noqa: E731
    words = ["checkpoint", "prune", str(run_folder), "--keep-last", "1"]
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("would remove") == 2 and names() >= whole
    assert main([*words, "--keep-every", "3", "--dry-run"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["checkpoint", "prune", str(run_folder), "--keep-every", "7", "--dry-run"]) == 0
    assert "checkpoint_10 " not in capsys.readouterr().out, "the newest stays, whatever the rule"
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.count("removed ") == 2 and "checkpoint_1 (" in printed
    assert names() == {"checkpoint_2", "checkpoint_10"}, "one whose manifest cannot be read is nobody's to remove"
    assert main(["checkpoint", "prune", str(run_folder)]) == 2
    assert "nobody said what stays" in capsys.readouterr().err


def test_prune_while_a_run_saves(run_folder, capsys):
    store = store_for(run_folder)
    staged = store.stage(str(run_folder / "checkpoints" / "checkpoint_11"), fresh=True)
    assert main(["checkpoint", "prune", str(run_folder), "--keep-last", "1"]) == 0
    assert "removed " in capsys.readouterr().out and os.path.isdir(staged)


@pytest.mark.parametrize("field", ["step", "metrics", "created", "run", "plan", "torch"])
def test_a_manifest_in_which_something_was_flipped(tmp_path, capsys, field):
    save(tmp_path / "one")
    path = tmp_path / "one" / "manifest.json"
    manifest = json.loads(path.read_text())
    other = {"step": 4, "metrics": {"loss": 0.0}, "created": 1.0, "run": "other", "plan": {}, "torch": "1.0"}
    path.write_text(json.dumps({**manifest, field: other[field]}))
    assert main(["checkpoint", "verify", str(tmp_path / "one")]) == 1
    output = capsys.readouterr().out
    assert output.startswith("one: damaged") and "its own checksum should be" in output
    with pytest.raises(CheckpointError, match="its own checksum"):
        Checkpointer().load(tmp_path / "one", TrainState(models={"model": nn.Linear(1, 1)}))


def test_a_manifest_of_an_older_paceline_has_no_checksum_and_loads(tmp_path, capsys):
    saved = save(tmp_path / "one")
    path = tmp_path / "one" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    path.write_text(json.dumps(manifest))
    assert main(["checkpoint", "verify", str(tmp_path / "one")]) == 0
    assert "no checksum of its own" in capsys.readouterr().out
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    Checkpointer().load(tmp_path / "one", TrainState(models={"model": model}))
    assert torch.equal(model[0].weight, saved[0].weight)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x80" * 40, b"", b"[" * 100_000, b"7"], ids=["bytes", "empty", "deep", "number"]
)
def test_foreign_bytes_in_a_checkpoint(tmp_path, capsys, name, content):
    save(tmp_path / "one")
    save(tmp_path / "two")
    (tmp_path / "two" / name).write_bytes(content)
    path = str(tmp_path / "two")
    for words in (["diff", path, str(tmp_path / "one")], ["diff", str(tmp_path / "one"), path], ["show", "--tensors", path],
                  ["ls", path], ["verify", path], ["ls", str(tmp_path)], ["verify", str(tmp_path)],
                  ["export", path, str(tmp_path / "out")]):  # fmt: skip
        code = main(["checkpoint", *words])
        output = capsys.readouterr()
        assert code in (0, 1) and len(output.err) < 5000, words
        assert code == 0 or "[checkpoint-" in output.err or "damaged" in output.out, words


@pytest.mark.parametrize("content", [b"\xff\xfe\x80" * 40, b"", b"\x08\0\0\0\0\0\0\0{}      ", b"\x02\0\0\0\0\0\0\0[]"])
def test_foreign_bytes_as_safetensors(tmp_path, capsys, content):
    save_model(nn.Linear(2, 1), tmp_path / "one")
    (tmp_path / "two.safetensors").write_bytes(content)
    code = main(["checkpoint", "diff", str(tmp_path / "one"), str(tmp_path / "two.safetensors")])
    assert code == 1
    assert "[checkpoint-damaged]" in capsys.readouterr().err or content.endswith(b"{}      ")


def test_a_folder_named_as_safetensors(tmp_path, capsys):
    save_model(nn.Linear(2, 1), tmp_path / "one")
    (tmp_path / "two" / "model.safetensors").mkdir(parents=True)
    assert main(["checkpoint", "diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    assert "[checkpoint-" in capsys.readouterr().err


@pytest.mark.needs("accelerate", "deepspeed")
def test_checkpoints_of_other_libraries_are_listed_and_left_alone(tmp_path, capsys):
    for name, files in (
        (
            "global_step4",
            ["mp_rank_00_model_states.pt", *(f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1))],
        ),
        ("checkpoint_0", ["random_states_0.pkl", "random_states_1.pkl", "random_states_2.pkl", "model.safetensors"]),
    ):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_bytes(b"x" * 50)
    for number in (1, 2):
        save(tmp_path / f"checkpoint_{number}", step=number)
    assert main(["checkpoint", "ls", "--json", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    facts = {row["name"]: (row["format"], row["state"], row["step"], row["world_size"]) for row in rows}
    assert facts == {
        "global_step4": ("deepspeed", "unchecked", 4, 2),
        "checkpoint_0": ("accelerate", "unchecked", None, 3),
        "checkpoint_1": ("native", "complete", 1, 1),
        "checkpoint_2": ("native", "complete", 2, 1),
    }
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert "not checked: the accelerate format has no checksums" in capsys.readouterr().out
    assert main(["checkpoint", "show", "--json", str(tmp_path / "checkpoint_0")]) == 0
    assert json.loads(capsys.readouterr().out)["files"]["model.safetensors"] == 50
    assert main(["checkpoint", "prune", "--keep-last", "1", str(tmp_path)]) == 0
    capsys.readouterr()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "checkpoint_0", "checkpoint_2", "global_step4",
    ]  # fmt: skip


def test_integers_that_double_precision_cannot_tell_apart_differ() -> None:
    from paceline_lens.checkpoint.difference import _compare

    first, other = torch.tensor([2**60, 5]), torch.tensor([2**60 + 1, 5])
    assert _compare("step", first, other, 0.0) is not None
    assert _compare("step", first, other, 1.0) is None and _compare("step", first, first.clone(), 0.0) is None
