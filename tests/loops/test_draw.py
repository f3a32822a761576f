"""The generator: the same program for the same seed, each feature is drawn, and each script compiles."""

from __future__ import annotations

import typing

from loops import programs
from loops.draw import draw
from loops.draw_low import KINDS
from loops.draw_more import FIRST
from loops.programs import Program, statements
from loops.script import (
    AVERAGES,
    EDITS,
    LATER_EDITS,
    LATER_OPTIMIZERS,
    LATER_SCHEDULERS,
    OPTIMIZERS,
    OPTIMIZERS_OF_MODULES,
    OPTIONS,
    SCHEDULERS,
    script,
)
from loops.zoo import BODIES, LATER_BODIES

SEEDS = range(1500)
LATER_SEEDS = range(FIRST, FIRST + 3000)  # with what `draw_more` adds


def features(program: Program) -> set[str]:
    """Names of what a program has."""
    names = {type(statement).__name__ for statement in statements(program.body)}
    names |= {f"body {model.body}" for model in program.models}
    for model in program.models:
        names |= {f"side {model.side}" * bool(model.side), f"frozen {model.frozen}" * bool(model.frozen)}
        names |= {"tied" * model.tied, "shared" * (model.body_of is not None)}
    names |= {
        f"{len(program.models)} models",
        f"{len(program.loaders)} loaders",
        f"{len(program.optimizers)} optimizers",
    }
    names |= {f"optimizer {optimizer.kind}" for optimizer in program.optimizers}
    names |= {f"scheduler {scheduler.kind}" for scheduler in program.schedulers}
    names |= {f"loop {program.loop.kind}", f"window {program.window}", f"precision {program.precision}"}
    names |= {f"ahead {program.loop.ahead}", f"again {program.loop.again}" * bool(program.loop.again)}
    names |= {f"loader {loader.kind}" for loader in program.loaders}
    names |= {f"taken {loader.taken}" * bool(loader.taken) for loader in program.loaders}
    names |= {f"average {average.kind}, prepared {average.prepared}" for average in program.averages}
    names |= {"short last batch" * any(loader.rows % loader.batch for loader in program.loaders)}
    names |= {"drop_last" * any(loader.drop_last for loader in program.loaders)}
    names |= {f"hook {hook.kind}" for hook in program.hooks}
    names |= {f"offload {program.offload}" * bool(program.offload)}
    names |= {
        f"recipe {program.recipe}" * bool(program.recipe),
        f"recompute {program.recompute}" * bool(program.recompute),
        f"dispatch {program.dispatch}" * (program.dispatch is not None),
        f"local, outer {program.local.outer}" if program.local else "",
        "twice" * program.twice,
        "loose" * program.loose,
        "begun" * (program.begun > 0),
        "plain save" * program.plain_save,
        "late" * (program.late is not None),
        "apart" * program.apart,
        "other optimizers afterwards" * bool(program.afterwards),
        "kept batches and a save" * (bool(program.loop.again) and program.save_at is not None),
        "save" * (program.save_at is not None),
        "batch of a rank" * (not program.split_batches),
    }
    names |= {f"{each.kind} {option}" for each in program.optimizers for option in [each.options] if option}
    if program.compiled is not None:
        names |= {f"compiled {program.compiled.place}", f"compiled by {program.compiled.backend}"}
    for each in statements(program.body):
        match each:
            case programs.Backward(losses, items, only):
                names |= {f"items {items}", "inputs" * (only is not None), "sum of losses" * (len(losses) > 1)}
            case programs.ForwardBackward(items=items):
                names.add(f"forward_backward items {items}")
            case programs.Clip(over, by=by):
                names |= {f"clip {over}", f"clip by {by}"}
            case programs.Zero(how, to_none=to_none):
                names |= {f"zero {how}", "zero in place" * (not to_none)}
            case programs.Write(kind, early=early):
                names |= {f"write {kind}", "write early" * early}
            case programs.When(kind):
                names.add(f"when {kind}")
            case programs.Edit(kind):
                names.add(f"edit {kind}")
            case programs.Alone(kind):
                names.add(f"alone {kind}")
            case programs.GradientsOf(kind, name=name):
                names |= {f"gradients {kind}", f"gradients of a loss {name is not None}"}
            case programs.Setting(name=name):
                names.add(f"setting {name}")
            case programs.States(kind):
                names.add(f"states {kind}")
            case programs.EvaluateKept(by=by):
                names.add(f"kept by {by}")
            case programs.Mode(training=training):
                names.add(f"training {training}")
            case programs.Remember(file):
                names.add(f"remember file {file}")
            case programs.Forward(penalty=True):
                names.add("penalty")
            case programs.Forward(through=through, detach=detach) if through is not None:
                names.add(f"through another, detached {detach}")
    return names - {""}


EXPECTED = {
    *(f"body {name}" for name in (*BODIES, *LATER_BODIES)),
    *(f"recipe {name}" for name in typing.get_args(programs.Recipe) if name),
    *(f"offload {name}" for name in typing.get_args(programs.Offload) if name),
    *("recompute blocks", "recompute 2", "recompute selective", "dispatch True", "dispatch False", "twice"),
    *("local, outer True", "local, outer False", "loader packed", "precision fp8"),
    *(f"optimizer {name}" for name in LATER_OPTIMIZERS),
    *(f"optimizer {name}" for name in OPTIMIZERS),
    *(f"optimizer {name}" for name in OPTIMIZERS_OF_MODULES),
    *(f"scheduler {name}" for name in SCHEDULERS),
    *(
        "1 models",
        "2 models",
        "3 models",
        "1 loaders",
        "2 loaders",
        "3 loaders",
        "1 optimizers",
        "2 optimizers",
        "3 optimizers",
    ),
    *(f"average {kind}, prepared {prepared}" for kind in AVERAGES for prepared in (True, False)),
    *(f"edit {kind}" for kind in EDITS),
    *("remember file True", "remember file False", "penalty", "plain save", "late", "apart", "kept batches and a save"),
    "other optimizers afterwards",
    *("loose", "begun", "tied", "shared", "side unused", "side branch", "frozen body", "frozen head"),
    *("loop for", "loop zip", "loop next", "loader map", "loader iterable", "loader sized", "loader endless"),
    *(
        "ahead 1",
        "ahead 2",
        "again the one before",
        "again another",
        "taken fresh",
        "taken cycle",
        "short last batch",
        "drop_last",
        "batch of a rank",
        "window 1",
        "window 2",
        "window 3",
        "window 4",
    ),
    *("precision no", "precision bf16", "precision fp16", "hook double", "hook clamp", "hook fused", "save"),
    *("hook input", "hook output", "hook input gradient", "hook output gradient"),
    *(
        "items None",
        "items int",
        "items float",
        "items mask",
        "sum of losses",
        "forward_backward items True",
        "forward_backward items False",
    ),
    *("clip model", "clip all", "clip optimizer", "clip by norm", "clip by value"),
    *("zero optimizer", "zero model", "zero hand", "zero in place"),
    *(
        "when every",
        "when at",
        "when from",
        "when sync",
        "when large",
        "through another, detached True",
        "through another, detached False",
    ),
    *(f"write {kind}" for kind in typing.get_args(programs.WriteKind)),
    "write early",
}
LATER_EXPECTED = {
    *(f"scheduler {name}" for name in LATER_SCHEDULERS),
    *(f"{kind} {option}" for kind, options in OPTIONS.items() for option in options),
    *(f"edit {kind}" for kind in LATER_EDITS),
    *("compiled before", "compiled after", "compiled in place", "compiled by eager", "compiled by aot_eager"),
    "inputs",
    *("alone evaluate", "alone saliency", "alone save", "alone print", "kept by copy", "kept by data"),
    *("gradients log", "gradients weigh", "gradients hessian", "gradients descend"),
    *("gradients of a loss True", "gradients of a loss False", "training True", "training False"),
    *("setting lr", "setting weight_decay", "setting momentum", "setting betas", "setting maximize"),
    *("states read", "states clear", "states zero", "states pop", "states halve"),
    *(kind.__name__ for kind in programs.Statement.__args__),  # type: ignore[attr-defined]
}


def test_the_same_seed_gives_the_same_program() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]


def test_every_feature_is_drawn() -> None:
    seen = set().union(*(features(draw(seed)) for seed in SEEDS))
    assert EXPECTED - seen == set()
    seen = set().union(*(features(draw(seed)) for seed in LATER_SEEDS))
    assert LATER_EXPECTED - seen == set()


def test_programs_of_earlier_seeds_stay_what_they_are() -> None:
    later = {"Alone", "GradientsOf", "Setting", "States", "EvaluateKept", "Mode"}
    assert not any(features(draw(seed)) & later for seed in range(FIRST - 300, FIRST))


def test_every_script_compiles() -> None:
    for seed in (*range(200), *range(FIRST, FIRST + 200)):
        compile(script(draw(seed), {"shard": 2}), f"<seed {seed}>", "exec")


def test_each_kind_of_less_memory_can_be_asked_for() -> None:
    plain = draw(4)
    for kind in KINDS:
        assert draw(4, kind=kind) != plain
        compile(script(draw(4, kind=kind), {"shard": 2}), f"<{kind}>", "exec")
