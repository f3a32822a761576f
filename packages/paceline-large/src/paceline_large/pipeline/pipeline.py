"""`pipeline`: pipeline parallelism. Ranks along `pp` hold consecutive blocks, and micro-batches pass through them.

    check, decide, cost    whether the blocks, the split and the schedule fit each other; pure
    apply                  broadcasts rank 0's values -> replaces blocks of other ranks by stubs -> `forward` runs a `Pipe`

Everything after `apply` works on the pruned model, whose names are the user's. See `stages`, `pipe`, and
`paceline_large.pipeline.split` for the split and the schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import mean
from typing import Any

from paceline.base.errors import Problem
from paceline.config.kinds import one_of, whole
from paceline.parallel.strategy import Averaging, Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import inside, listed
from paceline.plan.options import names_of, option
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin
from paceline_large.pipeline.split import SCHEDULES, balanced, chain, even, loads, matching, rank_of
from paceline_large.pipeline.timetable import PipelineTimetable

_SPLITS = ("uniform", "parameters", "time")


@dataclass(frozen=True)
class PipelineOptions:
    """How a model is divided into stages, and in which order they work."""

    schedule: str = option("1f1b", one_of(*SCHEDULES), "The order of forward and backward passes of micro-batches.")
    microbatches: int | str = option(
        "auto",
        whole(1, auto=True),
        "Largest number of equal parts of a batch; the largest number that divides its rows is used. auto: 4 x pp.",
    )
    stages_per_rank: int | str = option(
        "auto",
        whole(1, auto=True),
        "Stages on each rank; auto: the smallest number for the schedule, such as 2 for interleaved.",
    )
    split: Any = option(  # noqa: RUF009
        "uniform",
        None,
        "Where stages begin: uniform (as many blocks each), parameters, time (by `weights`), or the names of the blocks "
        "with which the second and later stages begin.",
    )
    blocks: Any = option("", None, "Names of the blocks in order; * is any part: layers.*; empty: found.")  # noqa: RUF009
    weights: Any = option([], None, "For split=time: the time of each block, as `measure_blocks` returns it.")  # noqa: RUF009
    keep: Any = option([], None, "Names of modules that all stages hold, because several stages run them.")  # noqa: RUF009


class Pipeline(Strategy):
    """Pipeline parallel over the `pp` axis."""

    name = "pipeline"
    stage = 10
    applied = "paceline_large.pipeline.pipeline_applied"
    axes = ("pp",)
    Options = PipelineOptions
    averaging = Averaging(
        over="pp: parameters that several stages hold",
        when="at the end of the window, after the others",
        result="the sum over the stages",
    )
    replaces_parameters = True
    removes_parameters = True
    divides_steps = True

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses a schedule, blocks and a split that do not fit each other."""
        options = self.options(plan)
        problems = _schedule_problems(options, plan.layout.pp)
        if problems:
            return problems
        count = plan.layout.pp * per_rank(options)
        blocks = chain(facts, names_of(options.blocks), count)
        problems = [*_block_problems(options, facts, blocks, count), *_balance_problems(plan, facts)]
        return problems or _split_problems(options, facts, blocks, count)

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Names the schedule with its bubble, and the blocks of each stage."""
        options = self.options(plan)
        ranks = plan.layout.pp
        schedule = SCHEDULES[options.schedule]
        stages = ranks * per_rank(options)
        blocks, begins = divide(options, facts, stages)
        ends = (*begins[1:], len(blocks))
        parts = []
        sizes = []
        for begin, end in zip(begins, ends, strict=True):
            part = blocks[begin]
            if end - begin > 1:
                part += f" .. {blocks[end - 1]}"
            parts.append(part)
            sizes.append(str(end - begin))
        most = microbatches(options, ranks)
        bubble = schedule.bubble(most, ranks, per_rank(options))
        waits = f"with {most} micro-batches a batch ranks wait {bubble:.0%} of the time, where stages take equally long"
        split = f"{len(blocks)} blocks on {stages} stages by {options.split}, {', '.join(sizes)} each"
        decisions = [
            Decision("pipeline.schedule", schedule.name, "derived", _where(plan, "schedule"), waits),
            Decision("pipeline.split", " | ".join(parts), "derived", _where(plan, "split"), split),
        ]
        batch_layers = [name for name, _ in facts.batch_layers]
        layers = [*facts.batch_norms, *batch_layers, *facts.spectral_norms]
        if layers:
            reason = (
                "statistics, frequencies and steps to a spectral norm are those of each micro-batch: other numbers than one "
                "process has over the whole batch"
            )
            decisions.append(Decision("pipeline.batch_layers", listed(layers, 3), "derived", reason=reason))
        return decisions

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Counts the fullest rank, and of activations those of the micro-batches that wait for their backward pass."""
        options = self.options(plan)
        ranks = plan.layout.pp
        stages = ranks * per_rank(options)
        blocks, begins = divide(options, facts, stages)
        ends = (*begins[1:], len(blocks))
        load_of_block = loads(facts, blocks)
        load_of_rank = [0] * ranks
        blocks_of_rank = [0] * ranks
        for stage, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            rank = rank_of(stage, ranks, SCHEDULES[options.schedule].placement)
            load_of_rank[rank] += sum(load_of_block[begin:end])
            blocks_of_rank[rank] += end - begin
        share = max(load_of_rank) / max(1, sum(load_of_block))
        count = microbatches(options, ranks)
        waiting = count
        if options.schedule not in ("gpipe", "breadth-first"):  # these run all forward passes first
            waiting = min(count, stages)
        activations = before.activations * max(blocks_of_rank) / len(blocks) * waiting / count
        return replace(
            before,
            parameters=int(before.parameters * share),
            gradients=int(before.gradients * share),
            optimizer=int(before.optimizer * share),
            activations=int(activations),
        )

    def timetable(self, plan: Plan, models: Sequence[ModelFacts]) -> PipelineTimetable | None:
        """Returns the order of the schedule. It is assumed that the largest model takes the time."""
        from paceline_large.pipeline.schedules import order  # needed by a forecast alone

        options = self.options(plan)
        ranks = plan.layout.pp
        stages = ranks * per_rank(options)
        facts = max(models, key=lambda model: model.parameters)
        blocks, begins = divide(options, facts, stages)
        weights: Sequence[float] = options.weights if options.split == "time" else _computing(facts, blocks)
        stage_weights: list[float] = []
        for begin, end in zip(begins, (*begins[1:], len(blocks)), strict=True):
            stage_weights.append(sum(weights[begin:end]))
        actions = order(options.schedule, ranks, per_rank(options), microbatches(options, ranks))
        stages_of_rank_0 = {stage for _, stage, _ in actions[0]}
        mean_weight = mean(stage_weights[stage] for stage in stages_of_rank_0)
        return PipelineTimetable(actions, [weight / mean_weight for weight in stage_weights])


# -- what options say ------------------------------------------------------------------------------------------


def per_rank(options: PipelineOptions) -> int:
    """Returns the number of stages on each rank."""
    if options.stages_per_rank == "auto":
        return SCHEDULES[options.schedule].stages_per_rank
    return int(options.stages_per_rank)


def microbatches(options: PipelineOptions, ranks: int) -> int:
    """Returns the largest number of micro-batches in a batch."""
    if options.microbatches == "auto":
        return 4 * ranks
    return int(options.microbatches)


def divide(options: PipelineOptions, facts: ModelFacts, stages: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the names of the blocks, and the numbers of the blocks with which stages begin."""
    blocks = chain(facts, names_of(options.blocks), stages)
    if options.split == "uniform":
        return blocks, even(len(blocks), stages)
    if options.split == "parameters":
        return blocks, balanced(loads(facts, blocks), stages)
    if options.split == "time":
        return blocks, balanced(list(map(float, options.weights)), stages)
    return blocks, (0, *_begins_at(options, blocks))


def _begins_at(options: PipelineOptions, blocks: Sequence[str]) -> list[int]:
    """Returns the numbers of the blocks that `split` names: the second and later stages begin with them."""
    return [blocks.index(matching(name, blocks)[0]) for name in names_of(options.split)]


def _where(plan: Plan, key: str) -> str:
    """Returns "options" for a decision that a user's option has made, else ""."""
    return "options" if key in plan.options.get("pipeline", {}) else ""


def _schedule_problems(options: PipelineOptions, ranks: int) -> list[Problem]:
    schedule = SCHEDULES[options.schedule]
    stages = per_rank(options)
    problems = []
    if not schedule.least <= stages <= schedule.most:
        needs = str(schedule.least)
        if schedule.least != schedule.most:
            needs = f"at least {schedule.least}"
        problems.append(
            Problem(
                "pipeline-stages",
                f"the schedule {schedule.name} cannot run {stages} stages on each rank.",
                why=f"pipeline.stages_per_rank={stages}; {schedule.name} needs {needs}",
                fix="leave stages_per_rank out: the schedule's own number is taken",
            )
        )
    count = microbatches(options, ranks)
    if not schedule.takes(count, ranks):
        if schedule.name in ("1f1b", "dualpipev"):
            needs = f"at least {ranks * schedule.least}, one for each stage"
        else:
            needs = f"rounds of equal size, and {count} are {count // ranks} rounds of {ranks} and a rest"
        fits = count + 1
        while not schedule.takes(fits, ranks):
            fits += 1
        problems.append(
            Problem(
                "pipeline-microbatches",
                f"the schedule {schedule.name} cannot run {count} micro-batches on {ranks} ranks.",
                why=f"pipeline.microbatches={count}; {schedule.name} needs {needs}",
                fix=f"set microbatches to {fits}, or use schedule={schedule.otherwise!r}",
            )
        )
    return problems


def _balance_problems(plan: Plan, facts: ModelFacts) -> list[Problem]:
    """Refuses a loss over the routers of all blocks, of which a stage has some."""
    if not facts.auxiliary_loss:
        return []
    return [
        Problem(
            "pipeline-balance",
            f"{facts.name} adds a loss over the routers of all its blocks.",
            why=f"{origin(plan, 'pp')}, so each stage has the routers of its own blocks alone; {facts.auxiliary_loss} and "
            "output_router_logits=True in the model's config",
            fix="set `model.config.output_router_logits = False`, or pp to 1",
        )
    ]


def _block_problems(options: PipelineOptions, facts: ModelFacts, blocks: Sequence[str], stages: int) -> list[Problem]:
    modules = [name for name, _ in facts.modules]
    layers = [layer.name for layer in facts.layers]
    for pattern in (*names_of(options.blocks), *names_of(options.keep)):
        if not matching(pattern, [*modules, *layers]):
            named_modules = [name for name in modules if name]  # the name of the model itself is empty
            return [
                Problem(
                    "pipeline-pattern",
                    f"no module of {facts.name} is called {pattern!r}.",
                    why=f"pipeline.blocks or pipeline.keep; modules: {_some(named_modules)}",
                    fix="use names as `model.named_modules()` gives them; * stands for one part between dots",
                )
            ]
    for inner, outer in permutations(blocks, 2):
        if inside(inner, outer):
            return [
                Problem(
                    "pipeline-pattern",
                    f"{inner} lies inside another block of the pipeline.",
                    why=f"pipeline.blocks={options.blocks!r} matches both",
                    fix="name only the blocks that run one after the other, such as layers.*",
                )
            ]
    if len(blocks) < stages:
        return [
            Problem(
                "pipeline-blocks",
                f"{facts.name} has {len(blocks)} blocks, but the pipeline has {stages} stages: some would be empty.",
                why=f"blocks: {_some(blocks)}",
                fix="use fewer ranks along pp, or name the blocks: options={'pipeline': {'blocks': 'layers.*'}}",
            )
        ]
    return []


def _split_problems(options: PipelineOptions, facts: ModelFacts, blocks: Sequence[str], stages: int) -> list[Problem]:
    if options.split == "time" and len(options.weights) != len(blocks):
        return [
            Problem(
                "pipeline-weights",
                f"split='time' needs the time of each of {len(blocks)} blocks, but {len(options.weights)} are given.",
                why=f"pipeline.weights; blocks: {_some(blocks)}",
                fix="measure: weights = paceline_large.pipeline.timing.measure_blocks(model, blocks, *inputs)",
            )
        ]
    if options.split in _SPLITS:
        return []
    given = names_of(options.split)
    wrong = [name for name in given if len(matching(name, blocks)) != 1]
    if wrong:
        return [
            Problem(
                "pipeline-split",
                f"the pipeline cannot be split at {wrong[0]!r}: {len(matching(wrong[0], blocks))} blocks are called so.",
                why=f"pipeline.split={options.split!r}; blocks: {_some(blocks)}",
                fix="name one block for each stage but the first, or use split='uniform'",
            )
        ]
    begins = _begins_at(options, blocks)
    if len(begins) != stages - 1 or sorted(set(begins)) != begins or begins[:1] == [0]:
        return [
            Problem(
                "pipeline-split",
                f"{len(begins)} names do not divide the blocks into {stages} stages with blocks in each.",
                why=f"pipeline.split={options.split!r}: the second and later stages begin there, in this order",
                fix=f"give {stages - 1} names in ascending order, none of them {blocks[0]}; or use split='uniform'",
            )
        ]
    return []


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none"
    shown = ", ".join(names[:4])
    if len(names) > 4:
        shown += f", ... {names[-1]}"
    return shown


def _computing(facts: ModelFacts, blocks: Sequence[str]) -> Sequence[float]:
    """Returns how much each block computes for a token, in proportion: the elements of its weights, without embeddings.

    A convolution uses its weights once for each position of its output. The number of positions is not known here, so that
    all blocks of such a model count the same.
    """
    layers = [layer for layer in facts.layers if layer.role != "embedding"]
    has_convolutions = False
    for layer in layers:
        has_convolutions = has_convolutions or any(len(shape) > 2 for _, shape in layer.shapes)
    weights = loads(replace(facts, layers=tuple(layers)), blocks)
    if has_convolutions or min(weights) == 0:
        return [1.0] * len(blocks)
    return [float(weight) for weight in weights]


STRATEGY = Pipeline()
