"""Writes the causes that `paceline verify` knows into their page.

python docs/list_causes.py          writes
python docs/list_causes.py --check  says whether the page is as it would be written; exit code 1 where not
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from paceline_lens.verify.bare.causes import CAUSES_OF_GRADIENTS, CAUSES_OF_ONE, CAUSES_OF_REPEAT, CAUSES_OF_RUN
from paceline_lens.verify.causes import CAUSES

BARE_CAUSES = (*CAUSES_OF_REPEAT, *CAUSES_OF_ONE, *CAUSES_OF_RUN, *CAUSES_OF_GRADIENTS)
PAGE = Path(__file__).parent / "how-to" / "verify.md"
_SHOWN = {
    "repeat": "one process, twice",
    "plain": "the script from before",
    "difference": "several processes",
    "itself": "any run",
}


def table(errors: bool) -> str:
    """The rows of one table."""
    lines = ["| cause | seen in | what it means | fix |", "|---|---|---|---|"]
    for cause in CAUSES:
        if cause.is_error == errors:
            lines.append(f"| `{cause.name}` | {_SHOWN[cause.explains]} | {cause.title} | {cause.fix} |")
    return "\n".join(lines)


def bare_table() -> str:
    """The rows of the table for scripts without Paceline."""
    lines = ["| cause | what it means | fix |", "|---|---|---|"]
    for cause in BARE_CAUSES:
        name = f"`{cause.name}`" if cause.is_error else f"`{cause.name}` (note)"
        lines.append(f"| {name} | {cause.title} | {cause.fix} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with the tables of today."""
    for mark, rows in (("causes", table(True)), ("notes", table(False)), ("bare causes", bare_table())):
        pattern = rf"(<!-- {mark} -->\n).*?(<!-- end of {mark} -->)"
        content = f"\n{rows}\n\n"
        page = re.sub(pattern, lambda match, content=content: match[1] + content + match[2], page, flags=re.DOTALL)
    return page


def main() -> int:
    """Writes the page, or looks at it."""
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        return int(written(page) != page)
    PAGE.write_text(written(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
