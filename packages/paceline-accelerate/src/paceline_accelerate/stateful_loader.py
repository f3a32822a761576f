"""torchdata's side of a stateful loader: its class, and the state that its `StatefulDataLoader` writes and reads.

The state of a prepared loader has the keys of torchdata beside our own, so that a plain `StatefulDataLoader` over the same data
goes on with it, and one of torchdata's own can be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

_FINISHED = "_iterator_finished"
# Arguments of a DataLoader that do not say which samples make a batch.
KEYWORDS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
            "prefetch_factor", "persistent_workers")  # fmt: skip


def stateful(base: DataLoader[Any]) -> StatefulDataLoader[Any]:
    """Returns a `StatefulDataLoader` of the same parts."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    if isinstance(base, StatefulDataLoader):
        return base
    keywords = {name: getattr(base, name) for name in ("dataset", *KEYWORDS)}
    if isinstance(base.dataset, IterableDataset):
        keywords.update(batch_size=base.batch_size, drop_last=base.drop_last)
    elif base.batch_sampler is not None:
        keywords["batch_sampler"] = base.batch_sampler
    else:
        keywords.update(batch_size=None, sampler=base.sampler)
    return StatefulDataLoader(**keywords)


def torchdata_state(
    num_workers: int, num_batches: int, is_finished: bool, num_samples: int | None = None
) -> dict[str, Any]:
    """Returns the keys of torchdata for a position.

    It counts batches, which a reader skips. States of samplers and datasets belong to the reading, which is a batch ahead.

    Args:
        num_workers: of the loader.
        num_batches: how many this process has got in the epoch.
        is_finished: whether the last of them was reached.
        num_samples: how many samples these are, where a plain sampler of torchdata in order goes on by their number.
    """
    sampler_state = None
    if num_samples is not None:
        sampler_state = {"samples_yielded": num_samples}
    counts = {
        "_index_sampler_state": None,
        "_sampler_iter_state": sampler_state,
        "_sampler_iter_yielded": num_batches,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
    }
    if not num_workers:
        whole = {"_num_yielded": num_batches, "fetcher_state": None, "dataset_state": None}
        return {**counts, **whole, _FINISHED: is_finished}
    workers = {}
    for worker in range(num_workers):
        workers[f"worker_{worker}"] = {"worker_id": worker, "dataset_state": None, "fetcher_state": None}
    snapshot = {
        "_snapshot_step": num_batches,
        "_last_yielded_worker_id": (num_batches - 1) % num_workers,
        "_main_snapshot": {**counts, "_num_workers": num_workers, "_base_seed": 0},
        "_worker_snapshots": workers,
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": 0, _FINISHED: is_finished}


_KEYS = frozenset({*torchdata_state(0, 0, False), *torchdata_state(1, 0, False)})


def without_torchdata(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state without the keys of torchdata."""
    return {name: value for name, value in state.items() if name not in _KEYS}


def batches_of(state: Mapping[str, Any]) -> int | None:
    """Returns after how many batches a state of torchdata's goes on, 0 for a finished epoch; None for any other state."""
    if _FINISHED not in state:
        return None
    if state[_FINISHED]:
        return 0
    snapshot = state.get("_snapshot")
    if snapshot is not None:
        return int(snapshot["_snapshot_step"]) + int(state["_steps_since_snapshot"])
    return int(state["_num_yielded"])
