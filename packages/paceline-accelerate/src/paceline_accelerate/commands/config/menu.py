"""A menu on a terminal: arrow keys and digits move a mark, and Enter takes the marked choice.

Where the answers come from a pipe, or in a notebook of Colab, a choice is given by its number on a line of its own.
"""

from __future__ import annotations

import importlib.util
import string
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# The last of the characters that an arrow key sends: ESC [ A, or ESC O A.
_ARROWS = {"A": "up", "B": "down"}


class BulletMenu:
    """A menu.

    Attributes:
        prompt: the question.
        choices: what can be chosen, in the order of their numbers, which begin with 0.
        position: number of the choice that is marked.
    """

    def __init__(self, prompt: str | None = None, choices: Sequence[object] = ()) -> None:
        self.prompt = prompt
        self.choices = choices
        self.position = 0

    def run(self, default_choice: int = 0) -> int:
        """Asks, and returns the number of the choice.

        Args:
            default_choice: number of the choice that is marked at first, which an empty line takes.

        Raises:
            EOFError: the input has ended.
            KeyboardInterrupt: somebody pressed Ctrl-C.
        """
        self.position = default_choice
        return self._by_keys() if _has_keys() else self._by_number()

    def _by_keys(self) -> int:
        count = len(self.choices)
        # Keys that were pressed before the menu is there are dropped, as in accelerate.
        with _keys() as keys:
            if self.prompt:
                print(self.prompt)
                print("Move with the arrow keys or a number; Enter takes the choice.")
            self._draw()
            for key in keys:
                if key == "enter":
                    break
                position = self.position
                if key == "up":
                    position -= 1
                elif key == "down":
                    position += 1
                elif key in string.digits:
                    position = int(key)
                if 0 <= position < count:
                    self.position = position
                    print(f"\033[{count}A", end="")
                    self._draw()
        # The choices make room for the one that was taken.
        print(f"\033[{count}A\033[J{self.choices[self.position]}", flush=True)
        return self.position

    def _draw(self) -> None:
        for number, choice in enumerate(self.choices):
            mark = ">" if number == self.position else " "
            print(f"\r\033[K {mark} {number}  {choice}")
        sys.stdout.flush()

    def _by_number(self) -> int:
        if self.prompt:
            print(self.prompt)
        for number, choice in enumerate(self.choices):
            print(f"   {number}  {choice}")
        while True:
            text = read_line(f"number [{self.position}]: ").strip()
            if not text:
                return self.position
            if text.isdecimal() and int(text) < len(self.choices):
                return int(text)
            print(f"{text!r} cannot be read; expected: a number from 0 to {len(self.choices) - 1}.")


def read_line(prompt: str) -> str:
    """Reads a line. What a pipe gives is shown, because no terminal does that."""
    print(prompt, end="", flush=True)
    text = input()
    if not sys.stdin.isatty():
        print(text)
    return text


def _has_keys() -> bool:
    """Whether each key can be read when it is pressed."""
    try:
        # The cells of Colab have a terminal that gives whole lines.
        is_colab = importlib.util.find_spec("google.colab") is not None
    except ModuleNotFoundError:
        is_colab = False
    return sys.stdin.isatty() and not is_colab


@contextmanager
def _keys() -> Iterator[Iterator[str]]:
    """Reads keys one by one, without showing them."""
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    mode = termios.tcgetattr(terminal)
    # Enter and Ctrl-C come as characters. Output stays as it is, so that "\n" begins a line.
    mode[0] &= ~termios.ICRNL
    mode[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG)
    mode[6][termios.VMIN] = 1
    mode[6][termios.VTIME] = 0
    termios.tcsetattr(terminal, termios.TCSAFLUSH, mode)
    try:
        yield _named_keys()
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _named_keys() -> Iterator[str]:
    """Yields "up", "down", "enter", or the character of a key."""
    while True:
        key = _character()
        if key == "\003":
            raise KeyboardInterrupt
        if key == "\r":
            yield "enter"
        elif key != "\033":
            yield key
        elif _character() in "[O":
            last = _character()
            if last in _ARROWS:
                yield _ARROWS[last]


def _character() -> str:
    character = sys.stdin.read(1)
    if not character:
        raise EOFError
    return character
