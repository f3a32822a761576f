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


def error_for(parser: argparse.ArgumentParser, words: Sequence[str], unknown: Sequence[str]) -> ConfigError:
    """The error about all unknown words at once.

    Args:
        parser: that of the command.
        words: all words after the command's name.
        unknown: those that the parser could not take.
    """
    problems: list[Problem] = []
    of_script: list[str] = []
    flags = [word for word in unknown if word.startswith("-")]
    for word in flags or unknown:
        problem = _of_launch(parser, word) or _slip(parser, words, word) or _of_dialect(parser, word)
        if problem is not None:
            problems.append(problem)
        elif flags and _takes_script(parser):
            of_script.append(word)
        else:
            what = f"`{parser.prog}` does not take {word.partition('=')[0]!r}."
            problems.append(Problem("command-line", what, fix=f"`{parser.prog} --help` lists what it takes"))
    if of_script:
        problems.append(_behind_script(parser, words, of_script))
    return ConfigError.of(problems)  # type: ignore[return-value]


def _takes_script(parser: argparse.ArgumentParser) -> bool:
    return any(action.dest == "script_args" for action in parser._actions)


def _of_launch(parser: argparse.ArgumentParser, word: str) -> Problem | None:
    """A setting of `paceline launch` that another command does not use."""
    from paceline.config.settings import settings_of

    flag = word.partition("=")[0]
    flags = {setting.flag for setting in settings_of().values()}
    if "--procs" not in parser._option_string_actions or flag.replace("_", "-") not in flags:
        return None
    what = f"`{parser.prog}` does not take {flag!r}, which would change nothing here."
    return Problem("command-line", what, fix="leave it out; it is for `paceline launch`")


def _of_dialect(parser: argparse.ArgumentParser, word: str) -> Problem | None:
    """The refusal of another library's flag that asks for what is not there; only where settings are taken at all."""
    from paceline.config.dialects import judged
    from paceline.config.given import Given

    if "--procs" not in parser._option_string_actions:
        return None
    flag, _, value = word.partition("=")
    verdict = judged(Given(flag.lstrip("-").replace("-", "_"), value or "true", "command line", flag))
    return verdict if isinstance(verdict, Problem) else None


def _slip(parser: argparse.ArgumentParser, words: Sequence[str], word: str) -> Problem | None:
    """A flag that is nearly one of the parser's, and that takes a value where that one does."""
    from paceline.config.given import nearest

    flag = word.partition("=")[0]
    has_value = "=" in word or _value_after(words, word) != ""
    # A short name of another launcher, such as --gpus, is too near to too much to be suggested.
    alike = [
        name
        for name, action in parser._option_string_actions.items()
        if name.startswith("--")
        and (action.nargs != 0) == has_value
        and (action.help != argparse.SUPPRESS or len(name) > len("--gpus"))
    ]
    close = nearest(flag, alike) if flag.startswith("--") else ""
    if not close:
        return None
    what = f"`{parser.prog}` does not take {flag!r}."
    return Problem("command-line", what, fix=f"write {_listed_name(parser, close)}")


def _listed_name(parser: argparse.ArgumentParser, flag: str) -> str:
    """The spelling of a flag that `--help` shows, where the flag is another name of a setting."""
    action = parser._option_string_actions[flag]
    setting = getattr(action, "name", "")
    same = [each for each in parser._actions if setting and getattr(each, "name", "") == setting]
    negated = getattr(action, "const", None) == "false"
    if same and not negated:
        return next(name for name in same[0].option_strings if name.startswith("--"))
    return flag.replace("_", "-") if setting else flag


def _value_after(words: Sequence[str], flag: str) -> str:
    """The word after a flag, where it looks like the flag's value: no flag and no script."""
    place = list(words).index(flag) if flag in words else len(words)
    after = words[place + 1] if place + 1 < len(words) else ""
    is_script = after.endswith(".py") or Path(after).is_file()
    return "" if after.startswith("-") or is_script else after


def _behind_script(parser: argparse.ArgumentParser, words: Sequence[str], flags: Sequence[str]) -> Problem:
    """Flags before the script that most probably are the script's own."""
    left, moved, named = list(words), list[str](), list[str]()
    args: argparse.Namespace
    # The value of an unknown flag was taken for the script, so that what follows it has not been looked at yet.
    while flags:
        for flag in flags:
            value = "" if "=" in flag else _value_after(left, flag)
            place = left.index(flag)
            moved += [flag, value] if value else [flag]
            named.append(flag.partition("=")[0])
            del left[place : place + (2 if value else 1)]
        args, unknown = parser.parse_known_args(left)
        flags = [word for word in unknown if word.startswith("-")]
    script = [] if args.script else ["train.py"]
    names = [f"`{flag}`" for flag in dict.fromkeys(named)]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    are = "is not a flag" if len(names) == 1 else "are not flags"
    it = "it belongs to the script, write it" if len(names) == 1 else "they belong to the script, write them"
    command = f"{parser.prog} {shlex.join([*left, *script, *moved])}"
    fix = f"if {it} after the script: `{command}`"
    return Problem("command-line", f"{listed} {are} of `{parser.prog}`.", fix=fix)
