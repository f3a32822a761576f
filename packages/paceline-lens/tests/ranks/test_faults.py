"""Whatever fails, the run ends with the losses that it would have had: cases as data, a row each.

Each case is launched as a user launches it, meets its faults, and goes on: by itself (`--max-restarts`), or because the
same command is given again by hand. Every loss that was ever written down, those of steps that were done twice included,
must be the one of a run that nothing happened to; and so must the final weights.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_python import executable

from paceline.checkpoint.format.manifest import verify
from paceline.checkpoint.store.local import LocalStore
from paceline_lens.checkpoint.listing import entries

SCRIPTS = Path(__file__).parent / "scripts"
BATCHES = 20
LIMIT_S = 60.0
AT_ANOTHER_WIDTH = 3e-6


@dataclass(frozen=True)
class Case:
    """What goes wrong, and what comes of it.

    Attributes:
        name: of the case.
        faults: keywords of `Fault`, or {"do": a method of the script's `Run`, "step", "rank", "with"}.
        codes: exit codes of the launches that it takes, one after the other.
        says: words that the launcher must have said: the cause.
        procs, then: processes of the first launch, and of the later ones.
        plan: further options of the launch.
        restarts: `--max-restarts`.
        begun: how often the script was started, all launches and restarts together; 0 where chance decides.
        workers, background, accumulate, keep, dropout, disk_bytes: what the script does.
    """

    name: str
    faults: list[dict[str, Any]]
    codes: tuple[int, ...] = (0,)
    says: tuple[str, ...] = ()
    procs: int = 2
    then: int = 0
    plan: str = ""
    restarts: int = 1
    begun: int = 2
    workers: int = 0
    background: bool = False
    accumulate: int = 1
    keep: int = 2
    dropout: float = 0.1
    disk_bytes: int = 0

    @property
    def undisturbed(self) -> Case:
        """The run that nothing happens to."""
        return replace(self, name="undisturbed", faults=[], codes=(0,), says=(), then=0, begun=1, background=False,
                       workers=0, keep=2, disk_bytes=0)  # fmt: skip


class Launches:
    """Launches cases, and remembers what comes of those that nothing happens to."""

    def __init__(self) -> None:
        self._references: dict[str, tuple[dict[int, float], dict[str, torch.Tensor]]] = {}

    def launch(self, case: Case, folder: Path, procs: int) -> tuple[int, str]:
        """Exit code and output of one launch."""
        description = folder / "case.json"
        description.write_text(json.dumps({**asdict(case), "folder": str(folder)}))
        words = ["launch", "--procs", str(procs), "--max-restarts", str(case.restarts), "--threads", "1"]
        words += ["--monitor-interval-s", "0.02", *case.plan.split(), str(SCRIPTS / "faulty.py"), str(description)]
        before = [str(SCRIPTS / "small_disk.py"), str(case.disk_bytes)] if case.disk_bytes else ["-m", "paceline"]
        # Into a file: a process that outlives its launcher would hold a pipe open.
        output = folder / "output"
        with output.open("w") as file:
            done = subprocess.run(
                [executable(), *before, *words], cwd=folder, stdout=file, stderr=file, timeout=LIMIT_S, check=False
            )
        return done.returncode, output.read_text(errors="replace")

    def reference(self, case: Case, folder: Path) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
        """Losses and weights of the same run, undisturbed."""
        plain = case.undisturbed
        key = repr((plain.procs, plain.plan, plain.accumulate, plain.dropout))
        if key not in self._references:
            folder.mkdir()
            code, said = self.launch(plain, folder, plain.procs)
            assert code == 0, said
            self._references[key] = losses(folder)[0], torch.load(folder / "final.pt", weights_only=True)
        return self._references[key]


@pytest.fixture(scope="module")
def launches() -> Launches:
    return Launches()


def losses(folder: Path) -> tuple[dict[int, float], list[tuple[int, float]]]:
    """The last loss of each batch, and all that were written down."""
    rows = [line.split() for line in (folder / "losses").read_text().splitlines()]
    written = [(int(step), float.fromhex(loss)) for step, loss in rows]
    return dict(written), written


def fault(kind: str, rank: int, step: int, place: str = "step", **more: Any) -> dict[str, Any]:
    """Keywords of a `Fault`."""
    return {"kind": kind, "rank": rank, "step": step, "place": place, **more}


def act(do: str, step: int, rank: int = 0, **options: Any) -> dict[str, Any]:
    """Something that the script does by itself."""
    return {"do": do, "step": step, "rank": rank, "with": options}


# Saves come after batches 3, 6, 9, ... and are counted from 0; an epoch has ten batches.
KILLED = "rank 1 was ended by SIGKILL"
KILLED_0 = "rank 0 was ended by SIGKILL"
HANGS = "--timeout-s 2"
DISK = 600_000
IN_THE_LOOP = [
    Case("raises in the forward", [fault("raise", 1, 7)], says=("InjectedFault: rank 1 fails at step 7",)),
    Case("raises on both ranks", [fault("raise", 0, 7), fault("raise", 1, 7)], says=("InjectedFault",), restarts=2, begun=0),
    Case("killed", [fault("kill", 1, 7)], says=(KILLED,)),
    Case("rank 0 killed", [fault("kill", 0, 7)], says=(KILLED_0,)),
    Case("both killed", [fault("kill", 0, 7), fault("kill", 1, 7)], says=("was ended by SIGKILL",), restarts=2, begun=0),
    Case("exits", [fault("exit", 1, 4)], says=("rank 1 failed with exit code 3",)),
    Case("killed before the first save", [fault("kill", 1, 1)], says=(KILLED,)),
    Case("killed after the last save", [fault("kill", 1, 18)], says=(KILLED,)),
    Case("killed twice", [fault("kill", 1, 4), fault("kill", 0, 13)], says=(KILLED, KILLED_0), restarts=2, begun=3),
    Case("killed, and started by hand", [fault("kill", 1, 7)], codes=(137, 0), says=(KILLED,), restarts=0),
    Case("one of three killed", [fault("kill", 2, 7)], says=("rank 2 was ended by SIGKILL",), procs=3),
    Case("one process raises", [fault("raise", 0, 12)], says=("InjectedFault",), procs=1),
    Case("one process killed", [fault("kill", 0, 5)], says=(KILLED_0,), procs=1),
    Case("killed in the gradients' all-reduce", [fault("kill", 1, 7, after_s=0.15), fault("sleep", 0, 7, seconds=0.4)],
         says=(KILLED,)),
    Case("rank 0 killed in the all-reduce", [fault("kill", 0, 8, after_s=0.15), fault("sleep", 1, 8, seconds=0.4)],
         says=(KILLED_0,)),
    Case("stopped", [fault("stop", 1, 7)], plan=HANGS),
    Case("rank 0 stopped", [fault("stop", 0, 7)], plan=HANGS),
    Case("slow, within the timeout", [fault("sleep", 1, 7, seconds=1)], plan=HANGS, begun=1),
    Case("a loader's worker killed", [act("kill_loader_worker", 7, 1)], says=("DataLoader worker",), workers=1),
    Case("killed in the second epoch, with loader workers", [fault("kill", 1, 14)], says=(KILLED,), workers=2),
    Case("killed in an accumulation window", [fault("kill", 1, 10)], says=(KILLED,), accumulate=2),
    Case("killed in a long window", [fault("kill", 0, 14)], says=(KILLED_0,), accumulate=4),
]  # fmt: skip
IN_A_SAVE = [
    Case("killed in a shard", [fault("kill", 1, 1, "shard")], says=(KILLED,)),
    Case("rank 0 killed in a shard", [fault("kill", 0, 2, "shard")], says=(KILLED_0,)),
    Case("killed between shards and manifest", [fault("kill", 0, 1, "manifest")], says=(KILLED_0,)),
    Case("killed before publishing", [fault("kill", 0, 1, "publish")], says=(KILLED_0,)),
    Case("killed after publishing", [fault("kill", 0, 1, "published")], says=(KILLED_0,)),
    Case("killed while pruning", [fault("kill", 0, 0, "prune")], says=(KILLED_0,)),
    Case("raises before a save", [fault("raise", 0, 1, "stage")], says=("InjectedFault", "checkpoint-failed")),
    Case("exits in a shard", [fault("exit", 1, 0, "shard")], says=("rank 1 failed with exit code 3",)),
    Case("stopped in a shard", [fault("stop", 1, 1, "shard")], plan=HANGS),
    Case("no room for a shard", [fault("disk-full", 1, 1, "shard")], says=("checkpoint-disk-full",)),
    Case("no room for the manifest", [fault("disk-full", 0, 1, "manifest")], says=("checkpoint-disk-full",)),
    Case("no permission for a save", [fault("forbidden", 0, 1, "stage")], says=("checkpoint-not-writable",)),
    Case("no permission to publish", [fault("forbidden", 0, 1, "publish")], says=("checkpoint-not-writable",)),
    Case("a real disk is full", [act("fill", 7)], says=("checkpoint-disk-full",), disk_bytes=DISK),
    Case("a real loss of permission", [act("forbid", 7)], says=("checkpoint-not-writable",)),
    Case("a real loss of permission, in the background", [act("forbid", 7)], 
         says=("checkpoint-not-writable",), background=True),
    Case("a file where the checkpoints were", [act("obstruct", 7)], says=("checkpoint-not-writable",)),
]  # fmt: skip
IN_THE_BACKGROUND = [
    Case("killed in a shard, in the background", [fault("kill", 1, 1, "shard")], says=(KILLED,), background=True),
    Case("killed before the manifest, in the background", [fault("kill", 0, 1, "manifest")], says=(KILLED_0,), background=True),
    Case("killed before publishing, in the background", [fault("kill", 0, 2, "publish")], says=(KILLED_0,), background=True),
    Case("killed while pruning, in the background", [fault("kill", 0, 0, "prune")], says=(KILLED_0,), background=True),
    Case("killed in the loop while a save is written", [fault("sleep", 1, 1, "shard", seconds=5), fault("kill", 1, 7)],
         says=(KILLED,), background=True),
    Case("raises in the loop while a save is written", [fault("sleep", 0, 1, "shard", seconds=1), fault("raise", 0, 7)],
         says=("InjectedFault",), background=True),
    Case("raises in the writer", [fault("raise", 0, 1, "publish")],
         says=("InjectedFault", "checkpoint-failed"), background=True),
    Case("no room, in the background", [fault("disk-full", 1, 1, "shard")], says=("checkpoint-disk-full",), background=True),
    Case("a real disk is full, in the background", [act("fill", 7)],
         says=("checkpoint-disk-full",), background=True, disk_bytes=DISK),
    Case("killed in the last save", [fault("kill", 1, 5, "shard")], says=(KILLED,), background=True),
]  # fmt: skip
IN_A_LOAD = [
    Case("killed in a load", [fault("kill", 1, 7), fault("kill", 0, 0, "load")], says=(KILLED, KILLED_0), restarts=2),
    Case("raises in a load", [fault("kill", 0, 7), fault("raise", 1, 0, "load")], says=(KILLED_0, "InjectedFault"), restarts=2),
    Case("a bit of the newest flipped", [act("damage", 7, how="flip"), fault("kill", 0, 7)],
         says=(KILLED_0, "passing over", "its checksum should be")),
    Case("the newest cut", [act("damage", 10, how="cut"), fault("kill", 0, 10)], says=("passing over", "bytes and has")),
    Case("a file of the newest removed", [act("damage", 10, how="remove"), fault("kill", 0, 10)],
         says=("passing over", "the file is missing")),
    Case("the newest manifest cut", [act("damage", 10, how="cut-manifest"), fault("kill", 0, 10)],
         says=("manifest.json", "cannot be read")),
]  # fmt: skip
LAUNCHERS = [
    Case("the launcher killed", [fault("kill-launcher", 1, 7)], codes=(-9, 0)),
    Case("the launcher killed while rank 0 publishes", [fault("kill-launcher", 0, 1, "publish")], codes=(-9, 0)),
    Case("the launcher killed in the background", [fault("kill-launcher", 0, 1, "shard")], codes=(-9, 0), background=True),
    Case("the reaper killed", [act("kill_reaper", 4)], begun=1),
    Case("the reaper killed, then a worker", [act("kill_reaper", 4), fault("kill", 1, 7)], says=(KILLED,)),
    Case("the reaper killed, then the launcher", [act("kill_reaper", 4), fault("kill-launcher", 1, 7)], codes=(-9, 0)),
    Case("preempted", [fault("preempt", 0, 7)], codes=(75, 0)),
    Case("preempted by a notice to a worker's host", [fault("preempt", 1, 13)], codes=(75, 0), background=True, workers=2),
    Case("preempted in a window", [fault("preempt", 1, 4)], codes=(75, 0), accumulate=4),
    Case("preempted while a save is written", [fault("sleep", 0, 1, "shard", seconds=0.5), fault("preempt", 1, 6)],
         codes=(75, 0), background=True),
    Case("preempted twice", [fault("preempt", 0, 4), fault("preempt", 1, 12)], codes=(75, 75, 0), begun=3),
    Case("one process preempted", [fault("preempt", 0, 7)], codes=(75, 0), procs=1),
]  # fmt: skip
AT_OTHER_WIDTHS = [
    Case("2 killed, 1 goes on", [fault("kill", 1, 7)], codes=(137, 0), says=(KILLED,), restarts=0, then=1),
    Case("2 killed, 3 go on", [fault("kill", 1, 14)], codes=(137, 0), says=(KILLED,), restarts=0, then=3),
    Case("1 killed, 2 go on", [fault("kill", 0, 5)], codes=(137, 0), restarts=0, procs=1, then=2, background=True),
    Case("3 lose their launcher, 2 go on", [fault("kill-launcher", 2, 11)], codes=(-9, 0), procs=3, then=2),
    Case("2 preempted, 3 go on with loader workers", [fault("preempt", 0, 7)], codes=(75, 0), then=3, workers=1),
    Case("2 preempted in a window, 1 goes on", [fault("preempt", 0, 6)], codes=(75, 0), then=1, accumulate=4),
]  # fmt: skip
UNDER_PLANS = [
    Case("killed under zero", [fault("kill", 1, 7)], says=(KILLED,), plan="--zero 2"),
    Case("killed under shard", [fault("kill", 1, 1, "shard")], says=(KILLED,), plan="--shard 2", background=True),
    Case("2 of shard killed, 3 go on", [fault("kill", 1, 7)], codes=(137, 0), restarts=0, plan="--zero 3", then=3),
    Case("shard preempted, 1 goes on", [fault("preempt", 1, 7)], codes=(75, 0), plan="--zero 3", then=1),
]  # fmt: skip
CASES = [*IN_THE_LOOP, *IN_A_SAVE, *IN_THE_BACKGROUND, *IN_A_LOAD, *LAUNCHERS, *AT_OTHER_WIDTHS, *UNDER_PLANS]
CASES = [replace(case, dropout=0.0) if case.then not in (0, case.procs) else case for case in CASES]


# Like others of their kind: `make ranks` runs these too, `make test-all` leaves them out.
LONG = {
    "exits", "killed after the last save", "rank 0 killed in the all-reduce", "one process raises",
    "killed in a long window", "raises on both ranks", "killed in the second epoch, with loader workers",
    "rank 0 killed in a shard", "exits in a shard", "killed before publishing", "no room for the manifest",
    "no permission to publish", "a file where the checkpoints were", "a real loss of permission, in the background",
    "killed while pruning, in the background", "killed in the last save", "killed before the manifest, in the background",
    "raises in the loop while a save is written", "raises in a load", "a file of the newest removed",
    "the reaper killed, then the launcher", "preempted in a window", "preempted twice",
    "preempted by a notice to a worker's host", "3 lose their launcher, 2 go on", "2 preempted in a window, 1 goes on",
    "2 of shard killed, 3 go on", "rank 0 stopped", "rank 0 killed", "one of three killed", "killed twice",
    "stopped in a shard", "2 preempted, 3 go on with loader workers", "the newest cut", "no room for a shard",
    "no room, in the background", "killed in a shard, in the background", "raises before a save", "killed while pruning",
    "one process preempted", "the launcher killed in the background", "1 killed, 2 go on", "both killed",
    "no permission for a save", "killed before publishing, in the background", "killed under zero",
    "one process killed", "killed, and started by hand", "killed between shards and manifest", "2 killed, 3 go on",
    "the reaper killed, then a worker", "a real disk is full, in the background", "2 killed, 1 goes on",
    "killed in the gradients' all-reduce", "killed in a shard", "a bit of the newest flipped", "raises in the writer",
}  # fmt: skip
assert {case.name for case in CASES} >= LONG


def ids(case: Case) -> str:
    return "".join(each if each.isalnum() else "-" for each in case.name)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=ids(case), marks=[pytest.mark.long] * (case.name in LONG)) for case in CASES]
)
def test_the_run_ends_as_if_nothing_had_happened(case: Case, launches: Launches, tmp_path: Path) -> None:
    expected, weights = launches.reference(case, tmp_path / "reference")
    folder = tmp_path / "case"
    folder.mkdir()
    codes, said = [], ""
    for number in range(len(case.codes)):
        code, text = launches.launch(case, folder, case.then if number and case.then else case.procs)
        codes.append(code)
        said += text
    assert tuple(codes) == case.codes, said
    for words in case.says:
        assert words in said, said
    starts = [line.split() for line in (folder / "starts").read_text().splitlines()]
    assert case.begun in (0, len(starts)), said

    last, written = losses(folder)
    assert sorted(last) == list(range(BATCHES)), said
    same = case.then in (0, case.procs)
    tolerance = 0.0 if same else AT_ANOTHER_WIDTH
    for step, loss in written:
        assert loss == pytest.approx(expected[step], rel=tolerance, abs=tolerance), (step, said)
    final = torch.load(folder / "final.pt", weights_only=True)
    for name, tensor in weights.items():
        torch.testing.assert_close(
            final[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda text: f"{text}\n{said}"
        )
    whole(folder)


def whole(folder: Path) -> None:
    """Every checkpoint that is left is whole, but for those that were damaged on purpose; no unfinished one is left."""
    noted = folder / "damaged"
    damaged = {line.split()[0] for line in noted.read_text().splitlines()} if noted.exists() else set()
    store = LocalStore()
    for each in entries(store, str(folder / "run" / "checkpoints")):
        assert not each.unfinished, each.name
        if each.name not in damaged:
            assert each.manifest and not verify(each.path, store), each.name
