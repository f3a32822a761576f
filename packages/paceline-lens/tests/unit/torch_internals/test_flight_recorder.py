"""The flight recorder's private dump."""

from __future__ import annotations

import json

import torch._C._distributed_c10d as c10d

from paceline_lens.torch_internals import flight_recorder


def test_the_dump_is_there_and_empty_without_a_group() -> None:
    dump = json.loads(c10d._dump_fr_trace_json(True, False))  # "entries" comes with the first collective
    assert {"version", "pg_status"} <= set(dump)
    assert isinstance(flight_recorder.last_collectives(3), list)


def test_an_entry_in_words() -> None:
    entry = {
        "profiling_name": "gloo:all_reduce", "collective_seq_id": 7, "process_group": ["0", "default_pg"],
        "input_sizes": [[3]], "state": "scheduled", "retired": False,
    }  # fmt: skip
    assert flight_recorder._line(entry) == "gloo:all_reduce number 7 of group 0, input [[3]]: scheduled"
    assert flight_recorder._line({**entry, "retired": True}).endswith(": completed")
