"""What `accelerate config` asks and writes for given answers, under the real library and under the names that we serve.

Under the real accelerate 1.15, `python questions_program.py` writes recorded_questions.json.
"""

import contextlib
import io
import json
import sys
import tempfile
import termios
import tty
from pathlib import Path
from unittest.mock import patch

UP, DOWN = "\033[A", "\033[B"
TWO_MACHINES = ["2", "1", "10.0.0.1", "29500", "no", "c10d", "yes"]
DEEPSPEED_ON_TWO = ["", "4", *TWO_MACHINES, "", "yes", "", "", "", "", "", "", "", ""]
FSDP = ["", "4", "", "", "", "", "yes"]
# Answers, one for each question; in a menu they are keys, and Enter follows. After the last one everything is left as it is.
CASES = {
    "nothing": [],
    "yes everywhere": ["", "", *["yes"] * 30],
    "bad answers": ["", "4", "two", "", "maybe", "no", "", "", "", "", "1.5", "8", "", "Yes", "2"],
    "keys": [f"x9{DOWN}{UP}", f"{DOWN * 3}{UP}\033[C\033[5~8{UP * 4}", "", "", "", "", "", "", " 2 "],
    "two machines": ["", "4", *TWO_MACHINES, "yes", f"9{DOWN}", "yes", "2", "yes", "yes", "yes", "no", "no", "no", "4", "0,1"],
    "mpirun": ["", "1", "", "", "yes", " /tmp/hosts ", "", "3"],
    "CPU": ["", "0", "yes", "", "", "2"],
    "DeepSpeed": ["", "0", "", "", "yes", "", "", "2", "1", "", "4", "yes", "0.5", "", "yes", "A,B", "2"],
    "DeepSpeed with NVMe": ["", "4", "", "", "", "yes", "", "3", "2", "2", "", "/disk", "x", "2", "", "yes"],
    "DeepSpeed from a file": ["", "4", "", "", "", "yes", "yes", "ds.json", "yes", "", "2"],
    "DeepSpeed from no file": ["", "4", "", "", "", "yes", "yes"],
    "DeepSpeed without ZeRO": ["", "4", "", "", "", "yes", "", "1"],
    "DeepSpeed on two machines": [*DEEPSPEED_ON_TWO, "0", "hosts", "yes", "a", "yes", "b", "4"],
    "DeepSpeed's launcher": [*DEEPSPEED_ON_TWO, "1", "2"],
    "FSDP 2": [*FSDP, "", "no", "yes", "1", "9", "1", "no", "yes", "yes", "2", "2", "1", "2", "1", "8"],
    "FSDP 2 without axes": [*FSDP, "", "", "", "2", "", "", "", "", "4", "2"],
    "FSDP 1": [*FSDP, "0", "3", "", "", "", "A,B", "1", "2", "yes", "no", "no", "no"],
    "FSDP 1 by default": [*FSDP, "0", "", "", "", "yes"],
    "NPUs": ["", "5", "", "", "", "", "", "2", "0"],
    "one GPU": ["", "4"],
    "fp8 without its libraries": ["", "", "", "", "", "", "", "3"],
    "the engine of Neuron": ["", "9", "", "", "", "yes"],
}  # fmt: skip
MORE = 200


class Terminal(io.StringIO):
    """An input that gives the answers of a case, key by key or line by line, and notes what was read in each way."""

    def __init__(self, answers):
        super().__init__()
        self.answers = iter([*answers, *[""] * MORE])
        self.keys = ""
        self.asked = ""

    def isatty(self):
        return True

    def fileno(self):
        return 0

    def read(self, count=-1):
        if not self.keys:
            self.keys = f"{next(self.answers)}\r"
            self.asked += "M"
        key, self.keys = self.keys[0], self.keys[1:]
        return key

    def line(self, prompt=""):
        self.asked += "L"
        return next(self.answers)


def asked_and_written(answers, name="config.yaml"):
    """Returns a letter for each question (M: a menu, L: a line), and the text of the file; None for an error."""
    import accelerate.commands.config.cluster as cluster
    from accelerate.commands import accelerate_cli

    terminal = Terminal(answers)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / name
        replaced = [
            patch.object(sys, "argv", ["accelerate", "config", "--config_file", str(path)]),
            patch.object(sys, "stdin", terminal),
            patch("builtins.input", terminal.line),
            patch.object(tty, "setraw", lambda *_: None),
            patch.object(termios, "tcgetattr", lambda _: [0] * 6 + [[0] * 40]),
            patch.object(termios, "tcsetattr", lambda *_: None),
            patch.object(cluster, "is_deepspeed_available", lambda: True),
            patch.object(cluster, "is_transformers_available", lambda: True),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ]
        for each in replaced:
            stack.enter_context(each)
        # The real command ends with an error of Python, ours with an exit code.
        with contextlib.suppress(RuntimeError, ValueError, NotImplementedError, SystemExit):
            accelerate_cli.main()
        text = path.read_text(encoding="utf-8") if path.exists() else None
    return [terminal.asked, text]


def everything():
    """All cases, one of them also as a JSON file."""
    cases = {name: asked_and_written(answers) for name, answers in CASES.items()}
    cases["JSON"] = asked_and_written(CASES["FSDP 2"], "config.json")
    return cases


if __name__ == "__main__":
    file = Path(__file__).with_name("recorded_questions.json")
    file.write_text(json.dumps(everything(), indent=1) + "\n", encoding="utf-8")
