"""What to say of words on a command line that its command does not take.

A word that is nearly one of the command's flags is a slip of the pen. Any other flag before a script most probably belongs
to the script, behind which it must stand; the error shows the command line that does so.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from paceline.base.errors import ConfigError, Problem
from paceline.cli._other_words import meaning
from paceline.cli._parser import Parser


def error_for(parser: Parser, words: Sequence[str], unknown: Sequence[str]) -> ConfigError:
    """Returns the error about all unknown words at once.

    Args:
        parser: that of the command.
        words: all words after the command's name.
        unknown: those that the parser could not take.
    """
    words, unknown, replaced = _without_other_words(parser, words, unknown)
    problems = list(replaced)
    of_script: list[str] = []
    flags = [word for word in unknown if word.startswith("-")]
    for word in flags or unknown:
        # The first that has something to say counts: the most certain meaning of a word comes first.
        problem = _of_launch(parser, word) or _plan(parser, words, word)
        problem = problem or _slip(parser, words, word) or _of_dialect(parser, word) or _script(parser, words, word)
        if problem is not None:
            problems.append(problem)
        elif flags and parser.takes_script:
            of_script.append(word)
        else:
            what = f"`{parser.prog}` does not take {word.partition('=')[0]!r}."
            problems.append(Problem("command-line", what, fix=f"`{parser.prog} --help` lists what it takes"))
    if of_script:
        behind = _behind_script(parser, words, of_script)
        if replaced:
            # The command line of the one fix is that of the other with the script's flags moved.
            what = f"{problems.pop(0).what} {behind.what}"
            behind = Problem("command-line", what, behind.why, behind.fix)
        problems.append(behind)
    return ConfigError.of(problems)  # type: ignore[return-value]


def _of_launch(parser: Parser, word: str) -> Problem | None:
    """Reports a setting of `paceline launch` that another command does not use."""
    from paceline.config.settings import settings_of

    flag = word.partition("=")[0]
    flags = {setting.flag for setting in settings_of().values()}
    if "--procs" not in parser.options or flag.replace("_", "-") not in flags:
        return None
    what = f"`{parser.prog}` does not take {flag!r}, which would change nothing here."
    return Problem("command-line", what, fix="leave it out; it is for `paceline launch`")


def _plan(parser: Parser, words: Sequence[str], word: str) -> Problem | None:
    """`--plan zero=2,shard=2`, as scripts write it: `Accelerator(plan={"zero": 2, "shard": 2})`."""
    flag, _, text = word.partition("=")
    if flag != "--plan":
        return None
    text = text or _value_after(words, word)
    words_of_flags = []
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if f"--{name}" not in parser.options:
            return None
        words_of_flags.append(f"--{name} {value}".strip())
    flags = " ".join(words_of_flags)
    what = f"`{parser.prog}` has no flag --plan: each part of a plan has a flag of its own."
    return Problem("command-line", what, fix=f"write {flags}")


def _without_other_words(
    parser: Parser, words: Sequence[str], unknown: Sequence[str]
) -> tuple[list[str], list[str], list[Problem]]:
    """Puts our flags in the place of what other libraries call them: `--bf16`, `--nproc 2`.

    Returns:
        The words with our flags, those that are still unknown, and the problem that says so; [] if there was no such word.
    """
    left = list(words)
    names: list[str] = []
    replaced = True
    while replaced:
        replaced = False
        # The value of an unknown flag was taken for the script, so what follows it is looked at only once it is known.
        for word in unknown:
            value = "" if "=" in word else _value_after(left, word)
            flags = meaning(f"{word} {value}".strip(), left)
            if word in left and flags and flags.split()[0] in parser.options:
                place = left.index(word)
                left[place : place + 1 + bool(value)] = flags.split()
                names.append(word.partition("=")[0])
                replaced = True
        if replaced:
            unknown = parser.parse_known_args(left)[1]
    if not names:
        return left, list(unknown), []
    listed = " and ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])
    what = f"`{parser.prog}` does not take {listed}."
    fix = f"write `{parser.prog} {shlex.join(left)}`"
    return left, list(unknown), [Problem("command-line", what, "Paceline has other flags for the same", fix)]


def _of_dialect(parser: Parser, word: str) -> Problem | None:
    """Returns the refusal of a flag of another library; only for commands that accept settings."""
    from paceline.config.dialects import judged
    from paceline.config.given import Given

    if "--procs" not in parser.options:
        return None
    flag, _, value = word.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    verdict = judged(Given(name, value or "true", "command line", flag))
    return verdict if isinstance(verdict, Problem) else None


def _script(parser: Parser, words: Sequence[str], word: str) -> Problem | None:
    """Reports a script after a command that shows settings alone."""
    if parser.takes_script or "--procs" not in parser.options or not word.endswith(".py"):
        return None
    before_script = words[: words.index(word)]
    fix = f"`{shlex.join(['paceline', 'plan', *before_script, word])}` explains the plan of a script"
    return Problem("command-line", f"`{parser.prog}` shows the settings alone and takes no script.", fix=fix)


def _slip(parser: Parser, words: Sequence[str], word: str) -> Problem | None:
    """Suggests the flag of the parser that is nearly the same, and that takes a value if the unknown one does."""
    from paceline.config.given import nearest

    flag = word.partition("=")[0]
    has_value = "=" in word or _value_after(words, word) != ""
    alike = []
    for name, action in parser.options.items():
        # A short name of another launcher, such as --gpus, resembles many words, so it is never suggested.
        is_listed = action.help != argparse.SUPPRESS or len(name) > len("--gpus")
        takes_value = action.nargs != 0
        if name.startswith("--") and is_listed and takes_value == has_value:
            alike.append(name)
    close = nearest(flag, alike) if flag.startswith("--") else ""
    if not close:
        return None
    what = f"`{parser.prog}` does not take {flag!r}."
    return Problem("command-line", what, fix=f"write {_listed_name(parser, close)}")


def _listed_name(parser: Parser, flag: str) -> str:
    """Returns the spelling that `--help` shows, if a flag is another name of a setting."""
    action = parser.options[flag]
    setting = getattr(action, "name", "")
    if not setting:
        return flag
    is_negated = getattr(action, "const", None) == "false"
    for name, other in parser.options.items():
        if not is_negated and name.startswith("--") and getattr(other, "name", "") == setting:
            return name
    return flag.replace("_", "-")


def _value_after(words: Sequence[str], flag: str) -> str:
    """Returns the word after a flag, where it looks like the flag's value: no flag and no script."""
    if flag not in words[:-1]:
        return ""
    after = words[words.index(flag) + 1]
    is_script = after.endswith(".py") or Path(after).is_file()
    if after.startswith("-") or is_script:
        return ""
    return after


def _behind_script(parser: Parser, words: Sequence[str], flags: Sequence[str]) -> Problem:
    """Returns flags before the script that most probably belong to the script."""
    left = list(words)
    moved: list[str] = []
    known_flags: list[str] = []
    # The value of an unknown flag was taken for the script, so that what follows it has not been looked at yet.
    while flags:
        for flag in flags:
            value = "" if "=" in flag else _value_after(left, flag)
            place = left.index(flag)
            words_of_flag = [flag, value] if value else [flag]
            moved += words_of_flag
            known_flags.append(flag.partition("=")[0])
            del left[place : place + len(words_of_flag)]
        args, unknown = parser.parse_known_args(left)
        flags = [word for word in unknown if word.startswith("-")]
    script = [] if args.script else ["train.py"]
    names = [f"`{flag}`" for flag in dict.fromkeys(known_flags)]
    command = f"{parser.prog} {shlex.join([*left, *script, *moved])}"
    if len(names) == 1:
        what = f"{names[0]} is not a flag of `{parser.prog}`."
        belongs = "it belongs to the script, write it"
    else:
        what = f"{', '.join(names[:-1])} and {names[-1]} are not flags of `{parser.prog}`."
        belongs = "they belong to the script, write them"
    return Problem("command-line", what, fix=f"if {belongs} after the script: `{command}`")
