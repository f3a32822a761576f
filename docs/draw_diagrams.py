"""Draws the pictures of the documentation, from numbers that `benchmarks/record_diagrams.py` recorded.

python docs/draw_diagrams.py

Each picture is as wide as the screen of a phone, follows the light or dark colours of the reader, and says in words (`<desc>`)
what it shows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from paceline_lens.watch.journal import launcher_file, rank_file

FOLDER = Path(__file__).parent / "diagrams"
WIDTH, LEFT, SIZE = 420, 10, 13
RIGHT = WIDTH - LEFT
BAR = 15
# A cautious mean width of a character, in parts of the font's size: a text that could leave the picture is refused.
CHARACTER = {"sans": 0.53, "mono": 0.62}
STYLE = """
text { fill: #24292f; } .quiet { fill: #57606a; } .strong { font-weight: bold; } .mono { font-family: monospace; }
.missing { fill: none; stroke: #8c959f; stroke-dasharray: 3 3; } .box { fill: #f6f8fa; stroke: #8c959f; }
.line { fill: none; stroke: #57606a; stroke-width: 1.5; } .tip { fill: #57606a; } .bad { fill: #cf222e; }
.part0 { fill: #4f7fd9; } .part1 { fill: #d98a35; } .part2 { fill: #4aa37c; } .part3 { fill: #9a6fd0; }
.part4 { fill: #8c959f; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .quiet { fill: #9da7b3; } .missing { stroke: #6e7681; } .box { fill: #161b22; stroke: #6e7681; }
.line { stroke: #9da7b3; } .tip { fill: #9da7b3; } .bad { fill: #ff7b72; }
}
"""


class Picture:
    """An SVG that grows downwards.

    Args:
        title: a few words.
        description: all that the picture says, for those who do not see it.

    Attributes:
        y: where the next thing goes.
    """

    def __init__(self, title: str, description: str) -> None:
        self.y = 8
        self._words = [f"<title>{escape(title)}</title>", f"<desc>{escape(description)}</desc>"]
        self._shapes: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A line of text whose baseline is `y`; `anchor` says what `x` is."""
        width = len(text) * SIZE * CHARACTER["mono" if "mono" in kind else "sans"]
        before = {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        if x - before < 0 or x - before + width > WIDTH:
            raise ValueError(f"this text does not fit: {text!r}")
        self._shapes.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A rectangle."""
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="2" class="{kind}"/>'
        )

    def box(self, x: float, y: float, width: float, lines: Sequence[str]) -> float:
        """A frame around lines of text, the first of them strong; returns where it ends."""
        height = 12 + 17 * len(lines)
        self.rect(x, y, width, height, "box")
        for number, line in enumerate(lines):
            if len(line) * SIZE * CHARACTER["sans"] > width - 8:
                raise ValueError(f"this text leaves its box: {line!r}")
            self.text(x + 8, y + 19 + 17 * number, line, "quiet" if number else "strong")
        return y + height

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A straight arrow, upright or level."""
        self._shapes.append(f'<path class="line" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>')
        if x == to_x:
            tip = f"M{to_x:g} {to_y:g}l-4 -7h8z"
        else:
            back = 7 if to_x < x else -7
            tip = f"M{to_x:g} {to_y:g}l{back} -4v8z"
        self._shapes.append(f'<path class="tip" d="{tip}"/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        """A point on a line of time."""
        self._shapes.append(f'<circle cx="{x:g}" cy="{y:g}" r="5" class="{kind}"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A straight line."""
        self._shapes.append(f'<path class="line" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>')

    def svg(self) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{WIDTH}" height="{self.y:g}" '
            f'viewBox="0 0 {WIDTH} {self.y:g}" font-family="sans-serif" font-size="{SIZE}">'
        )
        return "\n".join([head, *self._words, f"<style>{STYLE}</style>", *self._shapes, "</svg>"]) + "\n"


# -- what each plan puts where ------------------------------------------------------------------------------------

KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "communication": "gathered parts, buffers",
}
STATE = ("parameters", "gradients", "optimizer")
PLANS = {
    "replicate": "All ranks hold all. Each computes half the batch.",
    "--zero 1": "The optimizer states are divided.",
    "--zero 2": "The gradients are divided too.",
    "--zero 3": "The parameters too: blocks are gathered for use.",
    "--tp 2": "Matrices are divided. All ranks compute all samples.",
    "--pp 2": "Each rank holds some blocks. 4 micro-batches.",
}


def plans(recorded: dict[str, Any]) -> Picture:
    """Bytes of rank 0 by kind under each plan, as the planner predicts them."""
    data = recorded["plans"]
    predicted = data["plans"]
    peaks = ", ".join(f"{name} {megabytes(predicted[name]['peak'])}" for name in PLANS)
    picture = Picture(
        f"What rank 0 of {data['ranks']} holds under each plan",
        f"A GPT of {data['parameters'] / 1e6:.0f} million parameters, {data['rows']} rows of {data['length']} tokens, float32, "
        f"AdamW, {data['ranks']} ranks. Predicted peak of a step on rank 0: {peaks}.",
    )
    widest = {kind: max(plan["largest"][kind] for plan in predicted.values()) for kind in KINDS}
    pixels = (RIGHT - LEFT - 4 * (len(KINDS) - 1)) / sum(widest.values())
    places = [(LEFT, 0), (LEFT + 110, 0), (LEFT + 220, 0), (LEFT, 20), (LEFT + 110, 20)]
    for number, (words, (x, y)) in enumerate(zip(KINDS.values(), places, strict=True)):
        picture.rect(x, picture.y + y, 12, 12, f"part{number}")
        picture.text(x + 17, picture.y + y + 11, words)
    picture.rect(LEFT + 292, picture.y + 20, 12, 12, "missing")
    picture.text(LEFT + 309, picture.y + 31, "on rank 1")
    picture.y += 52
    for name, words in PLANS.items():
        plan = predicted[name]
        picture.text(LEFT, picture.y + 12, name, "mono strong")
        picture.text(RIGHT, picture.y + 12, f"peak {megabytes(plan['peak'])}", "strong", "end")
        picture.text(LEFT, picture.y + 29, words, "quiet")
        x: float = LEFT
        for number, kind in enumerate(KINDS):
            if kind in STATE:
                picture.rect(x, picture.y + 36, widest[kind] * pixels, BAR, "missing")
            picture.rect(x, picture.y + 36, plan["largest"][kind] * pixels, BAR, f"part{number}")
            x += widest[kind] * pixels + 4
        picture.y += 68
    return picture


def megabytes(count: float) -> str:
    """Bytes in words."""
    return f"{count / 1e6:.0f} MB"


# -- the way of a step --------------------------------------------------------------------------------------------

PHASES = {
    "data": "The loader gives this rank its part of the batch.",
    "forward": "The model computes the loss of these samples.",
    "backward": "Gradients. Full buckets are averaged already.",
    "reduce": "The rest of the averaging, without overlap.",
    "clip": "One norm over all ranks. Gradients are scaled.",
    "step": "The optimizer changes the parameters.",
}


def step(recorded: dict[str, Any]) -> Picture:
    """The phases of a step of one rank, in order, with their share of its time."""
    data = recorded["step"]
    times = data["ms"]
    shares = {phase: 100 * times[phase] / times["total"] for phase in PHASES}
    words = ", ".join(f"{phase} {share:.1f} %" for phase, share in shares.items())
    picture = Picture(
        "The phases of a step",
        f"The phases of a training step in order, with their share of its time, recorded on the CPU ({data['ranks']} ranks, "
        f"replicate): {words}.",
    )
    longest = max(shares.values())
    for number, (phase, does) in enumerate(PHASES.items()):
        top = picture.y
        picture.text(LEFT, top + 12, f"{number + 1}  {phase}", "strong")
        picture.text(RIGHT, top + 12, f"{shares[phase]:.1f} %", "", "end")
        picture.text(LEFT + 17, top + 29, does, "quiet")
        width = (RIGHT - LEFT - 17) * shares[phase] / longest
        picture.rect(LEFT + 17, top + 36, max(width, 1), 9, "part1" if phase == "reduce" else "part0")
        picture.y += 58
    return picture


# -- the way of a save --------------------------------------------------------------------------------------------


def save(recorded: dict[str, Any]) -> Picture:
    """What the loop and the writer do during a save in the background."""
    saves = [event for event in recorded["recovery"]["events"] if event["kind"] == "CheckpointSaved"]
    example = saves[-1]
    stall = f"{1000 * example['stall_s']:.0f} ms"
    complete = f"{1000 * example['save_s']:.0f} ms"
    picture = Picture(
        "A save in the background",
        f"The loop copies its part of the state and continues. It waits for {stall}. A thread writes the files into "
        f"a temporary folder, then their checksums into manifest.json, the last file, and then renames the folder. "
        f"The {example['bytes'] / 1e6:.0f} MB are complete after {complete}.",
    )
    middle = WIDTH / 2
    wide = middle - LEFT - 12
    right = middle + 12
    picture.text(LEFT, picture.y + 12, "the training loop", "strong")
    picture.text(right, picture.y + 12, "a second thread", "strong")
    top = picture.y + 22
    end = picture.box(LEFT, top, wide, ["1  copy in memory", "the part of this rank", f"the loop waits {stall}"])
    picture.arrow(LEFT + wide, top + 30, right, top + 30)
    stages = [
        ["2  write the files", "into .NAME.partial-…", "each rank writes its part"],
        ["3  manifest.json, last", "size and checksum", "of each file"],
        ["4  rename the folder", ".NAME.partial-… → NAME", f"complete after {complete}"],
    ]
    y = top
    for number, lines in enumerate(stages):
        bottom = picture.box(right, y, wide, lines)
        if number < len(stages) - 1:
            picture.arrow(right + wide / 2, bottom, right + wide / 2, bottom + 18)
        y = bottom + 18
    picture.arrow(LEFT + wide / 2, end, LEFT + wide / 2, end + 18)
    picture.box(LEFT, end + 18, wide, ["next steps", "computed while", "the thread writes"])
    picture.text(LEFT, y + 8, "After a crash before 4, the last checkpoint is intact,", "quiet")
    picture.text(LEFT, y + 25, "and the unfinished folder is never loaded.", "quiet")
    picture.y = y + 36
    return picture


# -- the way of a recovery ----------------------------------------------------------------------------------------


def recovery(recorded: dict[str, Any]) -> Picture:
    """What happened after a rank was killed, with the seconds since then."""
    data = recorded["recovery"]
    moments = recovery_moments(data)
    words = ". ".join(f"{seconds:.1f} s: {title}" for seconds, title, _ in moments)
    picture = Picture("The steps of a recovery", f"Recorded with 2 ranks on a CPU. {words}.")
    x = LEFT + 62
    for number, (seconds, title, lines) in enumerate(moments):
        top = picture.y
        picture.text(x - 14, top + 16, f"{seconds:.1f} s", "", "end")
        picture.text(x + 16, top + 16, title, "strong")
        for row, line in enumerate(lines):
            picture.text(x + 16, top + 33 + 17 * row, line, "quiet")
        picture.y += 32 + 17 * len(lines)
        if number < len(moments) - 1:
            picture.line(x, top + 16, x, picture.y + 6)
        picture.dot(x, top + 11, "bad" if number == 0 else "part0")
    return picture


def recovery_moments(data: dict[str, Any]) -> list[tuple[float, str, list[str]]]:
    """(seconds after the kill, what happened, more about it) from the lines of the journal."""
    events = data["events"]
    after = [event for event in events if event["s"] > 0]
    saved = [event["step"] for event in events if event["kind"] == "CheckpointSaved" and event["s"] < 0]
    new_round = next(event for event in after if event["kind"] == "Round")
    ended = [event["step"] for event in events if event["kind"] == "Tick" and event["s"] < new_round["s"]]
    hellos = [event for event in after if event["kind"] == "Hello"]
    ticks = [event for event in after if event["kind"] == "Tick" and event["s"] > hellos[-1]["s"]]
    first = next(event for event in ticks if event["steps"])
    started = ["it has noticed the loss, ended rank 0,", "and starts all ranks again"]
    ready = ["they import, connect, prepare,", "and verify the newest checkpoint"]
    resumed = [f"from the checkpoint of step {saved[-1]};", "later steps are computed again"]
    return [
        (0.0, "rank 1 is killed", [f"step {max(ended)} has ended; step {saved[-1]} is saved"]),
        (new_round["s"], "the launcher starts a new round", started),
        (hellos[-1]["s"], "both ranks have started again", ready),
        (first["s"], "steps go on", resumed),
    ]


# -- the way of a run ----------------------------------------------------------------------------------------------

RUN = (
    ("paceline launch train.py", ["one process for each device, with", "RANK, WORLD_SIZE and an address"], "launch"),
    ("Accelerator(...)", ["settings of all sources, a draft of the plan;", "the process group"], "config, plan, world"),
    ("prepare(model, optimizer, loader)", ["the plan, or one error with all problems;", "model and optimizer divided"],
     "parallel, optim, data"),
    ("for batch in loader:", ["this rank's samples of the batch"], "data"),
    ("    backward(loss)", ["the loss scaled; gradients averaged", "over all ranks as they become ready"], "optim, parallel"),
    ("    optimizer.step()", ["at the end of a window: gradients checked,", "clipped; then one step on each rank"], "optim"),
    ("save_state(), load_state()", ["model, optimizer, random states, position;", "for any number of ranks"], "checkpoint"),
)  # fmt: skip


def run(_recorded: dict[str, Any]) -> Picture:
    """What each line of a script does, from the start to a checkpoint, and which package does it."""
    says = ". ".join(f"{line.strip()}: {' '.join(does)} ({where})" for line, does, where in RUN)
    picture = Picture(
        "What happens in a run", f"Each line of a script, what it does, and the package that does it. {says}."
    )
    first_of_loop = picture.y
    for number, (line, does, where) in enumerate(RUN):
        if line.startswith("for"):
            first_of_loop = picture.y
        top, indent = picture.y, 16 * line.startswith(" ")
        bottom = picture.box(LEFT + indent, top, RIGHT - LEFT - indent - 18, [line.strip(), *does])
        picture.text(RIGHT - 26, top + 19, where, "quiet", "end")
        if number < len(RUN) - 1:
            picture.arrow(LEFT + 60, bottom, LEFT + 60, bottom + 16)
        if line.strip().startswith("optimizer"):
            # The loop goes back to the next batch.
            picture.line(RIGHT - 18, bottom - 20, RIGHT - 6, bottom - 20)
            picture.line(RIGHT - 6, bottom - 20, RIGHT - 6, first_of_loop + 24)
            picture.arrow(RIGHT - 6, first_of_loop + 24, RIGHT - 18, first_of_loop + 24)
        picture.y = bottom + 16
    picture.y -= 8
    return picture


# -- launcher, ranks, journal, page ---------------------------------------------------------------------------------


def watch(_recorded: dict[str, Any]) -> Picture:
    """Who writes the journal of a watched run, and who reads it."""
    picture = Picture(
        "Who writes and who reads the journal of a run",
        "paceline launch --watch starts the ranks. The launcher and each rank append to their own file in "
        "the folder of the run. The live page, "
        "paceline watch --text, paceline ps, paceline metrics and report.html read these files.",
    )
    half = (RIGHT - LEFT - 12) / 2
    second = LEFT + half + 12
    top = picture.y
    end = picture.box(LEFT, top, half, ["paceline launch --watch", "starts the ranks,", "notices failures"])
    picture.box(second, top, half, ["rank 0, rank 1, …", "train; a thread writes", "once a second"])
    picture.arrow(LEFT + half, top + 30, second, top + 30)
    folder = end + 26
    for x in (LEFT + half / 2, second + half / 2):
        picture.arrow(x, end, x, folder)
    picture.text(LEFT + half / 2 + 10, end + 18, "append", "quiet")
    picture.text(second + half / 2 + 10, end + 18, "append", "quiet")
    picture.rect(LEFT, folder, RIGHT - LEFT, 82, "box")
    picture.text(LEFT + 8, folder + 19, "runs/DATE-SCRIPT/watch/", "mono strong")
    for row, (file, says) in enumerate(
        (
            (launcher_file(0), "rounds, errors, the end"),
            (rank_file(0), "steps; plan, values, saves"),
            (rank_file(1), "steps, phases, memory"),
        )
    ):
        picture.text(LEFT + 8, folder + 38 + 17 * row, file, "mono")
        picture.text(RIGHT - 8, folder + 38 + 17 * row, says, "quiet", "end")
    readers = folder + 82 + 26
    for x in (LEFT + half / 2, second + half / 2):
        picture.arrow(x, folder + 82, x, readers)
    picture.text(LEFT + half / 2 + 10, folder + 100, "read", "quiet")
    picture.text(second + half / 2 + 10, folder + 100, "read", "quiet")
    live = ["during the run", "the page in a browser", "paceline watch --text", "paceline metrics, ps"]
    later = ["afterwards, or over ssh", "report.html", "paceline watch RUN", "paceline watch HOST:RUN"]
    picture.box(LEFT, readers, half, live)
    end = picture.box(second, readers, half, later)
    picture.y = end + 8
    return picture


PICTURES = {"plans": plans, "step": step, "save": save, "recovery": recovery, "watch": watch, "run": run}


def draw() -> dict[str, str]:
    """All pictures: name of the file -> SVG."""
    recorded = json.loads((FOLDER / "recorded.json").read_text(encoding="utf-8"))
    return {f"{name}.svg": picture(recorded).svg() for name, picture in PICTURES.items()}


if __name__ == "__main__":
    for name, svg in draw().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
