"""Shows each setting, its value and where it came from."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from paceline.base.errors import PlanError
from paceline.base.text_table import text_table
from paceline.config import schema
from paceline.config.dialects import dialects
from paceline.config.sources import Launch, resolve_launch


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--changed", action="store_true", help="leave out settings that have their default")
    for dialect in dialects():
        if dialect.explains:
            parser.add_argument(f"--{dialect.name}", metavar="FILE", help=dialect.explains)
    schema.add_options(parser, unlisted=("module", "no_python", "dry_run"))


def run(args: argparse.Namespace) -> int:
    """Prints what `paceline launch` with the same options would use."""
    for dialect in dialects():
        if not dialect.explains:
            continue
        path = getattr(args, dialect.name)
        if path is not None:
            print(dialect.explain(path, schema.given(args), as_json=args.json, changed=args.changed))
            return 0
    resolved = resolve_launch(schema.given(args))
    if resolved.run.options:
        _check_options(resolved)
    if args.json:
        settings = [asdict(row) for row in resolved.decisions]
        unused = [asdict(row) for row in resolved.unused]
        report = {"file": resolved.file, "settings": settings, "unused": unused, "notices": resolved.notices}
        print(json.dumps(report, indent=2))
    else:
        print(table(resolved, changed=args.changed))
    return 0


def _check_options(resolved: Launch) -> None:
    """Refuses options that a run would refuse.

    Raises:
        PlanError: `plan-option`, `strategy-option`, `strategy-value`; all at once.
    """
    # The strategies parse their options and need torch. Without options, this command need not wait for its import.
    from paceline.parallel.strategy import STRATEGIES
    from paceline.plan.options import read
    from paceline.plan.plan import Decision
    from paceline.plan.resolve import OTHER_OPTIONS, option_problems
    from paceline.run.observers import OBSERVERS

    options = dict(resolved.run.options)
    of_observers = {name: options.pop(name) for name in OTHER_OPTIONS if name in options}
    decisions = [Decision(**vars(row)) for row in resolved.decisions]
    places = {row.field: row.where or row.source for row in resolved.decisions}
    problems = option_problems(options, decisions, STRATEGIES)
    for name, block in of_observers.items():
        observer = OBSERVERS.get(name)
        problems += read(observer.Options, observer.flattened(block), name, places)[1]
    if problems:
        raise PlanError.of(problems)


def table(resolved: Launch, *, changed: bool = False) -> str:
    """Returns the settings as a table of aligned columns."""
    rows = [("setting", "value", "from", "")]
    for choice in (*resolved.decisions, *resolved.unused):
        if choice.source != "default" or not changed:
            origin = f"{choice.source} ({choice.where})" if choice.where else choice.source
            rows.append((choice.field, schema.shown_value(choice.value) or "-", origin, choice.reason))
    if len(rows) == 1:
        rows.append(("(none differs from its default)", "", "", ""))
    heading = f"file: {resolved.file or 'none'}\n"
    notices = [f"\nnotice: {text}" for text in resolved.notices]
    return "\n".join([heading, *text_table(rows), *notices])
