"""An evaluation on several processes after which nothing is gathered is told once; what gathers in any way is not."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.testing import run_ranks

DATA = TensorDataset(torch.arange(12.0).unsqueeze(1))


class Script:
    """A training script with an evaluation after each epoch.

    Attributes:
        body: what it does with each batch of the evaluation.
        after: what it does after the evaluation, with the sum of the outputs.
        early: whether it leaves the evaluation after one batch.
        only_main: whether rank 0 alone evaluates.
        backward: whether a backward pass follows in the loop.
        mode: whether the model is in evaluation mode.
        epochs: how many; the run ends after one epoch, and goes on after several.
    """

    def __init__(self, body=None, after=None, early=False, only_main=False, backward=False, mode=True, epochs=2):
        self.body, self.after, self.early, self.only_main = body, after, early, only_main
        self.backward, self.mode, self.epochs = backward, mode, epochs

    def run(self):
        accelerator = Accelerator(cpu=True)
        net = torch.nn.Linear(1, 1)
        train, held_out = DataLoader(DATA, 2, shuffle=True), DataLoader(DATA, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        net, optimizer, train, held_out = accelerator.prepare(net, optimizer, train, held_out)
        for _ in range(self.epochs):
            net.train()
            for (x,) in train:
                accelerator.backward(net(x).sum())
                optimizer.step()
                optimizer.zero_grad()
            net.train(not self.mode)
            total = torch.zeros(1)
            if not self.only_main or accelerator.is_main_process:
                for (x,) in held_out:
                    with torch.set_grad_enabled(self.backward):
                        out = (accelerator.unwrap_model(net) if self.only_main else net)(x)
                    if self.backward:
                        accelerator.backward(out.sum())
                    if self.body:
                        self.body(accelerator, out)
                    total += out.detach().sum()
                    if self.early:
                        break
            if self.after:
                self.after(accelerator, total)
        if self.epochs == 1:
            accelerator.end_training()


WRONG = {"training goes on": Script(), "the run ends": Script(epochs=1)}
RIGHT = {
    "gather_for_metrics": Script(lambda accelerator, out: accelerator.gather_for_metrics(out)),
    "gathered objects": Script(lambda accelerator, out: accelerator.gather_for_metrics([1] * len(out), True)),
    "gather": Script(lambda accelerator, out: accelerator.gather(out.sum())),
    "reduced afterwards": Script(after=lambda accelerator, total: accelerator.reduce(total)),
    "gathered afterwards": Script(after=lambda accelerator, total: accelerator.gather(total)),
    "by torch": Script(after=lambda accelerator, total: dist.all_reduce(total)),
    "an early end": Script(early=True),
    "rank 0 alone": Script(only_main=True),
    "a loader that trains": Script(backward=True),
    "no evaluation": Script(mode=False, backward=True),
}


def told(names):
    messages, warned = [], {}
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("paceline.data").addHandler(handler)
    for name in names:
        {**WRONG, **RIGHT}[name].run()
        if dist.is_initialized():  # the run has not ended: each rank has come to its last step
            dist.barrier()
        warned[name] = [message for message in messages if "nothing was gathered" in message]
        messages.clear()
    return warned


def of_all(names, world):
    ranks = run_ranks(told, world, args=(list(names),))
    return {name: [message for rank in ranks for message in rank[name]] for name in names}


def test_a_metric_of_one_part_is_told_once_with_the_line_of_its_loop() -> None:
    lines = Path(__file__).read_text().splitlines()
    loop = next(number for number, line in enumerate(lines, 1) if line.strip() == "for (x,) in held_out:")
    for name, messages in of_all(WRONG, 2).items():
        (message,) = messages
        assert f"{Path(__file__).name}:{loop} " in message, name


def test_one_process_is_told_nothing() -> None:
    assert not any(of_all(WRONG, 1).values())


def test_no_false_alarm() -> None:
    assert not any((told := of_all(RIGHT, 2)).values()), told
