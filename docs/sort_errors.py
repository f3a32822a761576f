"""Tidies docs/errors.md: append a section anywhere, then run this.

Sections come into alphabetical order, and code blocks without a language become `text`.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).with_name("errors.md")


def sort(text: str) -> str:
    """The page with its `## code` sections sorted."""
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return "\n\n".join(part.strip() for part in [head, *sorted(sections, key=lambda part: part.split("\n")[0])]) + "\n"


def name_blocks(text: str) -> str:
    """The page with a language at each opening fence."""
    return re.sub(
        r"^```(\w*)\n(.*?)^```$", lambda m: f"```{m[1] or 'text'}\n{m[2]}```", text, flags=re.MULTILINE | re.DOTALL
    )


if __name__ == "__main__":
    PAGE.write_text(name_blocks(sort(PAGE.read_text(encoding="utf-8"))), encoding="utf-8")
