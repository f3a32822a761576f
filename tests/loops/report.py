"""Counts outcomes, and writes them as a page: by plan, refusals by code, and what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from loops.check import Case
from loops.compare import Outcome

# Whether a user would expect what is refused to work, and why it is refused.
JUDGEMENTS = {
    "items-mixed": "no: two counted losses of one window have no common denominator before the window ends",
    "prepare-kind": "no: a parameter of no module, where ranks divide layers or sequences",
    "models-shared": "partly: two prepared models that share parameters can be one module, as the error says",
    "data-assigned": "no: torch loses the value of a divided parameter; the error names a way that works",
    "shard-written": "partly: in mixed precision the weights of a pass have less precision; the error names a way that works",
    "data-interleaved": "partly: of two loops at once, nobody knows whose values were gathered; a call for each loader works",
    "shard-double-backward": "partly: a gradient penalty under FSDP2; the error names stage 2, which works",
    "batch-norm-double-backward": "partly: local statistics work, but are not those of one process",
    "pipeline-blocks": "no: there are more stages than blocks",
    "pipeline-draws": "partly: a stage has only its own parameters; a whole copy that is drawn and loaded works",
    "shard-diverged": "partly: rank 0 alone calls a divided model; the error names a way that works",
    "local-sgd-plan": "no: no rank has a whole model, or whole states, that it could step alone",
    "offload-elementwise": "no: Muon needs whole matrices, and a part of a step would be another step",
    "fp8-layers": "no: no layer has sizes that float8 products allow",
    "recompute-blocks": "no: one of the models has no blocks that could be computed again",
    "recompute-twice": "partly: a gradient penalty where blocks keep some results; the error names a way that works",
    "tensor-nothing": "no: nobody but the user knows how these layers could be divided",
}


@dataclass
class Tally:
    """Outcomes of many cases; those that did not end equal, by name."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # (plan and width, kind)
    whats: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, code or what is wrong)
    programs: int = 0
    unclear: int = 0
    failures: list[tuple[Case, Outcome]] = field(default_factory=list)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, cases: Sequence[Case], outcomes: Sequence[Outcome | None]) -> None:
        for case, result in zip(cases, outcomes, strict=True):
            if result is None:
                continue
            self.counts[(f"{case.plan} on {case.world}", result.kind)] += 1
            self.whats[(result.kind, result.what)] += 1
            self.examples.setdefault((result.kind, result.what), case.name)
            if result.kind == "failed":
                self.failures.append((case, result))

    def merge(self, other: Tally) -> None:
        self.counts += other.counts
        self.whats += other.whats
        self.programs += other.programs
        self.unclear += other.unclear
        self.failures += other.failures
        self.examples = {**other.examples, **self.examples}

    @property
    def cases(self) -> int:
        return sum(self.counts.values())

    def total(self, kind: str) -> int:
        return sum(count for (_, own), count in self.counts.items() if own == kind)


def page(tally: Tally, title: str, command: str) -> str:
    """The report in Markdown."""
    lines = [
        f"# {title}",
        "",
        f"`{command}`: {tally.programs} programs, {tally.cases} combinations of program, plan and width: "
        f"{tally.total('equal')} equal, {tally.total('refused')} refused, {tally.total('failed')} failed. "
        f"{tally.unclear} drawn programs have no clear meaning, or fail in plain PyTorch, too, and were left out.",
        "",
        "| plan | equal | refused | failed |",
        "|---|---|---|---|",
    ]
    for plan in sorted({plan for plan, _ in tally.counts}, key=lambda plan: (plan.split()[-1], plan)):
        numbers = [str(tally.counts[(plan, kind)]) for kind in ("equal", "refused", "failed")]
        lines.append(f"| {plan} | {' | '.join(numbers)} |")
    lines += [
        "",
        "## Refused",
        "",
        "| code | times | an example | would a user expect it to work? |",
        "|---|---|---|---|",
    ]
    for (kind, what), count in tally.whats.most_common():
        if kind == "refused":
            lines.append(f"| `{what}` | {count} | {tally.examples[(kind, what)]} | {JUDGEMENTS.get(what, '?')} |")
    lines += ["", "## Failed", "", "| what | times | an example |", "|---|---|---|"]
    for (kind, what), count in tally.whats.most_common():
        if kind == "failed":
            lines.append(f"| {what} | {count} | {tally.examples[(kind, what)]} |")
    return "\n".join(lines) + "\n"
