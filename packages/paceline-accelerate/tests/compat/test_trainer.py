"""`transformers.Trainer` trains on the names that we serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launched import launch, run
from safetensors.torch import load_file

SHARDED = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
PROGRAM = Path(__file__).parent / "programs" / "trainer.py"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("size", "options", "flags"),
    [
        (1, {}, ["--mixed_precision", "bf16"]),
        (2, {"gradient_accumulation_steps": 2, "bf16": True}, []),
        (2, {}, ["--shard", "2"]),
        (2, {}, ["--shard", "auto", "--zero", "2"]),  # what an error of ours recommends
        (2, {"fsdp": "full_shard", "fsdp_config": SHARDED}, []),
        (2, {"model": "llama"}, ["--tp", "2"]),
    ],
    ids=[
        "one process, the launcher's precision",
        "two processes, accumulation, bf16",
        "sharded",
        "zero 2",
        "fsdp",
        "tp",
    ],
)
def test_trainer(tmp_path: Path, size: int, options, flags) -> None:
    words = launch("accelerate", size, PROGRAM, *flags)
    run([*words, str(tmp_path), json.dumps(options)], tmp_path, warm=["warm_accelerate"])
    results = [json.loads((tmp_path / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    whole, resumed = results[0]
    assert whole["processes"] == size
    assert whole["losses"][-1] < 0.85 * whole["losses"][0] and whole["predictions"] == [11, 8, 17]
    assert whole["precision"] == (["bf16"] * 2 if "bf16" in flags or "bf16" in options else ["no"] * 2)
    assert resumed == whole, "a resumed run ends where the whole one did"
    if "fsdp" in options:  # as under the real one: `merge_fsdp_weights` makes whole weights of a checkpoint's
        assert (tmp_path / "out" / "checkpoint-6" / "pytorch_model_fsdp_0" / ".metadata").is_file()
        return
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: value.tolist() for name, value in saved.items()} == {
        name: value for name, value in resumed["weights"].items() if name in saved
    }
    for other in results[1:]:
        assert [each["weights"] for each in other] == [each["weights"] for each in results[0]], "the ranks agree"
