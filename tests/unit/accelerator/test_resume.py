"""`resume()` on one process: what is loaded, where the loop goes on, and what SIGTERM does from then on."""

import os
import signal
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline import Accelerator
from paceline.base.errors import CheckpointError
from paceline.base.exits import PREEMPTED
from paceline.data.active import ActiveLoaders
from paceline.data.feed import Mark
from paceline.data.loader import GivenBatch
from paceline.world.events import Events

ROWS, BATCH, EPOCHS = 12, 3, 3
STEPS = ROWS // BATCH


class Stream(IterableDataset):
    """The rows of a list, without an index."""

    def __iter__(self):
        return iter(rows())


@pytest.fixture(autouse=True)
def same_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def rows():
    return list(torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1)))


def train(folder, act=lambda step: None, *, stream=False, accumulate=1, plan=None, before=lambda accelerator: None):
    """Three epochs; returns the losses by step, and what happened besides."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True, data_seed=2, project_dir=folder, gradient_accumulation_steps=accumulate, plan=plan
    )
    data = Stream() if stream else TensorDataset(torch.stack(rows()))
    loader = DataLoader(data, BATCH, shuffle=not stream)
    evaluation = DataLoader(torch.arange(4), 2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, evaluation, loader = accelerator.prepare(model, optimizer, evaluation, loader)
    before(accelerator)
    start = accelerator.resume()
    log, step = [], STEPS * start.epoch + loader.position.samples // BATCH
    try:
        for epoch in range(start.epoch, EPOCHS):
            for batch in loader:
                x = batch if stream else batch[0]
                with accelerator.accumulate(model):
                    loss = model(x).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                step += 1
                log.append((step, loss.item()))
                act(step)
            log.append((f"end {epoch}", sum(len(each) for each in evaluation)))
            act(f"end {epoch}")
    except SystemExit as left:
        return log, left.code, start
    finally:
        accelerator.end_training()
    return log, 0, start


def end_me(when):
    """Asks this process to end, at one moment of the run."""
    return lambda now: os.kill(os.getpid(), signal.SIGTERM) if now == when else None


@pytest.mark.parametrize("stream", [False, True], ids=["indexed", "stream"])
@pytest.mark.parametrize("when", [2, STEPS, STEPS + 1, "end 0"])
def test_a_run_that_is_asked_to_end_goes_on_with_the_same_numbers(tmp_path, when, stream):
    whole, _, _ = train(tmp_path / "whole", stream=stream)
    first, code, begun = train(tmp_path / "run", end_me(when), stream=stream)
    assert (code, begun.path, begun.step) == (PREEMPTED, None, 0)
    rest, code, start = train(tmp_path / "run", stream=stream)
    assert code == 0 and start.path.endswith("checkpoint_0")
    assert first + rest == whole
    # Asked in the body of the last batch, it leaves before the end of the epoch, which comes once, in the second run.
    stopped = STEPS + 1 if when == "end 0" else when
    assert start.epoch == (stopped - 1) // STEPS and start.step == stopped


def test_a_window_is_never_cut(tmp_path):
    whole, _, _ = train(tmp_path / "whole", accumulate=2)
    first, code, _ = train(tmp_path / "run", end_me(1), accumulate=2)
    assert code == PREEMPTED and len(first) == 2
    rest, _, start = train(tmp_path / "run", accumulate=2)
    assert first + rest == whole and start.step == 1


def test_a_second_run_begins_anew_where_it_is_told(tmp_path, caplog):
    whole, _, _ = train(tmp_path)
    train(tmp_path, end_me(2))
    assert train(tmp_path, plan={"resume": "no"})[0] == whole
    caplog.clear()
    _, _, start = train(tmp_path, end_me(6))
    assert start.step == 2 and "--resume no" in caplog.text and start.path in caplog.text
    chosen = train(tmp_path, plan={"resume": start.path})
    assert chosen[2].step == 2 and chosen[2].path == start.path
    newest = tmp_path / "checkpoints" / "checkpoint_1"
    shard = next(newest.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    caplog.clear()
    assert train(tmp_path)[2].step == 2 and shard.name in caplog.text


def test_where_every_checkpoint_is_damaged_nothing_begins_anew_unasked(tmp_path):
    whole, _, _ = train(tmp_path / "whole")
    train(tmp_path / "run", end_me(2))
    shard = next((tmp_path / "run" / "checkpoints" / "checkpoint_0").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"none of the 1 checkpoints[^~]*{shard.name}") as caught:
        train(tmp_path / "run")
    assert caught.value.code == "checkpoint-damaged"
    assert train(tmp_path / "run", plan={"resume": "no"})[0] == whole and shard.exists()


def test_a_folder_is_for_the_first_attempt(tmp_path, monkeypatch):
    train(tmp_path, end_me(2))
    chosen = str(tmp_path / "checkpoints" / "checkpoint_0")
    other = tmp_path / "other"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(other, end_me(5), plan={"resume": chosen})[2].path == chosen
    assert train(other, plan={"resume": chosen})[2].step == 5
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert train(other, plan={"resume": chosen})[2].step == 2


def test_what_a_launched_run_has_saved_itself_comes_first_in_every_round(tmp_path, monkeypatch):
    monkeypatch.delenv("PACELINE_RUN", raising=False)
    train(tmp_path, end_me(2))
    chosen = str(tmp_path / "checkpoints" / "checkpoint_0")
    other = tmp_path / "other"
    train(other, end_me(5))
    monkeypatch.setenv("PACELINE_RUN", "paceline@1.5")
    monkeypatch.setenv(
        "TORCHELASTIC_RESTART_COUNT", "1"
    )  # it failed before it had saved: another run's are not its own
    assert train(other, end_me(3), plan={"resume": chosen})[2].path == chosen
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # a host came: that is no failure
    found = train(other, plan={"resume": chosen})[2]
    assert found.path == str(other / "checkpoints" / "checkpoint_1")
    assert train(other, plan={"resume": "no"})[2] == found
    monkeypatch.setenv("PACELINE_RUN", "paceline@2.5")
    assert train(other, plan={"resume": "no"})[2].path is None


def test_no_place_to_look(tmp_path):
    with pytest.raises(CheckpointError, match="checkpoint-unnamed"):
        train(None, plan={"resume": "auto"})
    assert train(None)[2].path is None


@pytest.mark.parametrize("how", ["load_state", "nothing", "default"])
def test_a_wish_to_resume_is_not_passed_over(tmp_path, how):
    torch.manual_seed(0)
    plan = None if how == "default" else {"resume": "auto"}
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, plan=plan)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if how == "load_state":
        accelerator.save_state()
        accelerator.load_state()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    if how == "nothing":
        with pytest.raises(CheckpointError, match="resume-unused"):
            optimizer.step()
        return
    optimizer.step()
    optimizer.step()


def test_handlers_of_the_script_are_called_too_and_put_back(tmp_path):
    heard = []

    def mine(number, frame):
        heard.append(number)

    signal.signal(signal.SIGTERM, mine)
    assert train(tmp_path, end_me(2))[1] == PREEMPTED
    assert heard == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is mine


def test_where_the_script_ignores_the_signal_it_stays_ignored(tmp_path):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert train(tmp_path, end_me(2))[1] == 0


def test_the_second_request_ends_at_once_but_not_an_echo_of_the_first(tmp_path):
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def act(step):
            for _ in range(3 if step == 2 else 0):
                os.kill(os.getpid(), signal.SIGTERM)

        code = train(tmp_path / "echo", act)[1]

        def again(step):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1.1)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)

        train(tmp_path / "again", again)
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    assert (tmp_path / "echo" / "checkpoints").exists() and not (tmp_path / "again" / "checkpoints").exists()


def test_a_save_that_fails_is_no_preemption(tmp_path):
    def act(step):
        if step == 2:
            (tmp_path / "checkpoints").write_text("in the way")
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(CheckpointError):
        train(tmp_path, act)


def test_between_two_batches():
    """A boundary is where no batch waits for its backward pass, in no other loop's body; loops beside it do not count."""

    class Loop:
        newest = None

        def __init__(self):
            self.trains = False

        def train(self):
            self.trains = True

        def give(self):
            active.give(GivenBatch(weakref.ref(self), Mark(0, None, 0, 0, None, {}), None, None, False), None)

    events, asked = Events(), []
    active = ActiveLoaders(events)
    events.between_batches.subscribe(lambda: asked.append(1))
    outer, inner = Loop(), Loop()

    def asks(loader):
        asked.clear()
        active.ask(loader)
        return bool(asked)

    active.push(outer)
    outer.give()
    assert not asks(outer)  # it has not trained: an evaluation
    active.train()
    assert asks(outer)
    active.push(inner)  # a loop in the body of the first
    inner.give()
    active.train()
    assert not asks(inner) and asks(outer)
    outer.give()  # but the first advances as well: they go side by side
    assert not asks(inner)
    inner.give()
    active.train()
    assert asks(inner) and asks(outer)
    active.remove(outer)
    active.push(outer)
    outer.give()
    assert not asks(inner) and not asks(outer)


def test_a_new_run_beside_folders_that_are_no_checkpoints_says_so(tmp_path, caplog):
    (tmp_path / "checkpoints" / "checkpoint_3").mkdir(parents=True)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.prepare(nn.Linear(1, 1))
    start = accelerator.resume()
    assert start.path is None
    messages = [record.getMessage() for record in caplog.records]
    (message,) = [text for text in messages if "no checkpoint to load" in text]
    assert "checkpoint_3 without" in message
