"""The command line is frozen: options that people have in their scripts neither vanish nor change by accident.

`command_line.txt` holds every spelling that is accepted, a line an option. After a change that is meant, write it anew
and read the difference:

    python tests/shape/test_command_line.py > tests/shape/command_line.txt
"""

from pathlib import Path

from paceline.cli.main import commands, parser_for

SNAPSHOT = Path(__file__).with_name("command_line.txt")


def spellings() -> str:
    """Each command's options with what follows them; those that `--help` leaves out are marked."""
    lines = []
    for name in commands():
        for action in parser_for(name)._actions:
            takes = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
            hidden = "  (hidden)" if action.help == "==SUPPRESS==" else ""
            lines.append(f"{name}: {', '.join(action.option_strings) or '(positional)'}{takes}{hidden}")
    return "\n".join(lines) + "\n"


def test_the_command_line_is_as_it_was():
    assert spellings() == SNAPSHOT.read_text(encoding="utf-8"), __doc__


if __name__ == "__main__":
    print(spellings(), end="")
