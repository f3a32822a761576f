"""`fit`: what a plan left to `auto`, decided when the first models are prepared, for the memory that there is.

draft (some of shard, zero, tp, pp on auto)  ->  facts of the models  ->  choose  ->  draft with everything said
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.base.errors import PlanError
from paceline.config.settings import RunSettings
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import draft
from paceline.planner.estimate import Need, choose, elsewhere, gib, settings_of
from paceline.world.world import World

KEPT_FREE = 0.3  # of the memory: activations are not known before a batch has been seen


def fit(
    plan: Plan, models: Iterable[ModelFacts], on_host: bool, world: World, memory: int, host: int | None = None
) -> Plan:
    """Returns the draft with values for its open settings: the cheapest ones whose bytes fit.

    Args:
        plan: a draft with `open` settings.
        models: facts of the first models that are prepared.
        on_host: as in `Need`.
        world: the processes.
        memory: bytes of each rank; the same on all ranks.
        host: bytes of the host's memory for each rank, if the device has another; None where it is not known.

    Raises:
        PlanError: `plan-none-fits`, with what each would need.
    """
    usable = int(memory * (1 - KEPT_FREE))
    host = None if host is None else int(host * (1 - KEPT_FREE))
    fixed = {name: value for name, value in settings_of(plan).items() if name not in plan.open}
    need = Need(tuple(models), on_host=on_host)
    folder = plan.disk_folder
    chosen = choose(need, world.size, world.local_size, usable, fixed, plan.open, folder=folder, host=host)
    if chosen.settings is None or chosen.estimate is None:
        # The last plans that were tried divide the model most.
        rejected = [str(plan) for plan in chosen.rejected[-3:]]
        fix = "use more processes"
        if "offload" not in plan.open or (on_host and not folder):
            fix += f", or let states wait elsewhere: `--offload {'auto=disk:FOLDER' if on_host else 'auto'}`"
        raise PlanError(
            "plan-none-fits",
            "no plan fits into the memory that there is.",
            why=[f"{gib(memory)} a rank, of which {KEPT_FREE:.0%} are kept for activations", *rejected],
            fix=fix,
        )
    reason = f"fits: {gib(chosen.estimate.held)} of {gib(usable)} a rank, activations not counted"
    reason += "".join(f"; {line}" for line in elsewhere(chosen.estimate))
    if chosen.rejected:
        reason += f"; not {chosen.rejected[-1]}"
    # Where the user wrote "auto" stays visible, with the value that was chosen for it.
    decisions = {decision.field: decision for decision in plan.decisions}
    for name, value in chosen.settings.items():
        where = decisions[name].where if name in decisions else ""
        decisions[name] = Decision(name, value, "derived", where, reason)
    settings = RunSettings.of({**fixed, **chosen.settings, "options": plan.options})
    return draft(settings, decisions.values(), world.size, plan.semantics)
