"""Logs, batch sizes and LocalSGD on real processes."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from paceline.base.errors import TrainError
from paceline.observe.logs import get_logger
from paceline.testing import RankFailed, run_ranks
from paceline_large.optim.batch_size import find_executable_batch_size
from paceline_large.optim.local_sgd import LocalSGD


def rank() -> int:
    return torch.distributed.get_rank()


def test_ranks_speak_in_turn(tmp_path):
    path = tmp_path / "said"

    def speak():
        handler = logging.FileHandler(path)
        logger = get_logger("test.turn", log_level="INFO")
        logger.logger.addHandler(handler)
        time.sleep(0.1 * (2 - rank()))  # the last rank is ready first
        logger.info("rank %d", rank(), in_order=True)
        if rank() == 1:
            logger.logger.setLevel("ERROR")  # silent, but still takes its turn
        logger.info("again %d", rank(), in_order=True)
        logger.info("main alone")

    run_ranks(speak, world=3)
    assert path.read_text().split("\n") == ["rank 0", "rank 1", "rank 2", "again 0", "again 2", "main alone", ""]


def test_ranks_agree_on_a_batch_size():
    def search():
        tried = []

        @find_executable_batch_size(starting_batch_size=16)
        def train(batch_size):
            tried.append(batch_size)
            if rank() == 1 and batch_size > 4:
                raise MemoryError
            return batch_size

        return train(), tried

    assert run_ranks(search, world=2) == [(4, [16, 8, 4])] * 2


def test_a_rank_that_fails_otherwise_does_not_leave_the_rest_waiting():
    def search():
        @find_executable_batch_size
        def train(batch_size):
            if rank() == 1:
                raise ValueError("broken")

        if rank() == 1:
            train()
            return
        with pytest.raises(TrainError) as caught:
            train()
        assert caught.value.code == "batch-size-peer"

    with pytest.raises(RankFailed, match="broken") as caught:
        run_ranks(search, world=2)
    assert caught.value.rank == 1


def test_local_sgd_leaves_the_ranks_alike():
    def train():
        def reduce(tree, reduction):
            for leaf in (flat := [leaf.clone() for leaf in tree]):
                torch.distributed.all_reduce(leaf)
            return [leaf / 2 for leaf in flat]

        acc = SimpleNamespace(
            num_processes=2, sync_gradients=True, run=SimpleNamespace(
                note=lambda decision: None, events=SimpleNamespace(
                    saved=SimpleNamespace(subscribe=lambda tell: None), backward=SimpleNamespace(subscribe=lambda note: None),
                ),
                prepared=SimpleNamespace(hold_gradients=lambda models, alone: nullcontext()),
            ),
            gradients=SimpleNamespace(mark_replicas=lambda equal: None),
            reduce=reduce,
        )  # fmt: skip
        net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(net.weight, float(rank()))
        weights = []
        with LocalSGD(acc, net, local_sgd_steps=2) as local:
            for _ in range(3):
                with torch.no_grad():
                    net.weight += rank()
                local.step()
                weights.append(net.weight.item())
        return [*weights, net.weight.item()]

    # 0 and 1; step: 0, 2; step: 0, 3 -> 1.5 both; step: 1.5, 2.5; the end: 2 both
    assert run_ranks(train, world=2) == [[0.0, 1.5, 1.5, 2.0], [2.0, 1.5, 2.5, 2.0]]
