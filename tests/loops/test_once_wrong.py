"""Drawn programs whose numbers were wrong once, made smaller and kept as data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from loops.check import Case, check
from loops.programs import (
    Accumulate,
    AddGroup,
    Alone,
    AveragedCopy,
    Backward,
    Clip,
    Compiled,
    Continue,
    EvaluateAverage,
    EvaluateBatch,
    Forward,
    ForwardBackward,
    Freeze,
    GradientsOf,
    Hook,
    ItemCount,
    Loader,
    Loop,
    Model,
    Next,
    Optimizer,
    Program,
    Record,
    Slice,
    Step,
    UpdateAverage,
    When,
    Write,
    Zero,
)


def grows(items: ItemCount | None) -> Program:
    """Gradients of the body, which nobody steps or clears, grow from window to window; saved in the second one."""
    return Program(
        seed=1,
        models=(Model("Mlp"),),
        optimizers=(Optimizer("SGD", (Slice(0, "head"),)),),
        loaders=(Loader(rows=48, batch=12, kind="iterable"),),
        body=(
            Accumulate(
                (0,),
                (
                    Forward(0, 0, 0),
                    Backward((0,), items),
                    Clip("model", 0, 100.0),
                    Step(0),
                    Zero("optimizer", 0),
                ),
            ),
        ),
        loop=Loop("for", (0,), epochs=2),
        window=3,
        save_at=5,
    )


# Momentum moves a frozen body as long as its gradients are zeros and not None.
FROZEN_WITH_ZEROS = Program(
    seed=2,
    models=(Model("Mlp"),),
    optimizers=(Optimizer("momentum", (Slice(0, "all"),)),),
    loaders=(Loader(rows=72, batch=12),),
    body=(
        When("at", 2, 0, (Freeze(0, "body", True),)),
        When("at", 4, 0, (Freeze(0, "body", False),)),
        Accumulate(
            (0,), (Forward(0, 0, 0), Backward((0,)), Step(0), When("sync", 0, 0, (Zero("model", 0, to_none=False),)))
        ),
        EvaluateBatch(0, 0),
    ),
    window=2,
)

# The script clears, by hand and by the model, between forward and backward, where FSDP2 has whole parameters in the model.
CLEARED_BETWEEN = Program(
    seed=3,
    models=(Model("Mlp"),),
    optimizers=(Optimizer("momentum", (Slice(0, "all"),)),),
    loaders=(Loader(rows=48, batch=12),),
    body=(
        Forward(0, 0, 0),
        When("every", 2, 0, (Zero("hand", 0),)),
        When("every", 2, 1, (Zero("model", 0, to_none=False),)),
        Backward((0,)),
        Clip("model", 0, 100.0),
        Step(0),
    ),
)

# A forward pass whose output is detached leaves whole parameters in the model, whose gradients are then clipped.
DETACHED_BEFORE_CLIP = Program(
    seed=4,
    models=(Model("Mlp"), Model("Mlp")),
    optimizers=(Optimizer("SGD", (Slice(0, "all"), Slice(1, "all"))),),
    loaders=(Loader(rows=48, batch=12),),
    body=(
        Forward(0, 0, 0),
        Backward((0,)),
        Forward(1, 1, 0, through=0, detach=True),
        Backward((1,)),
        Clip("model", 0, 0.1),
        Clip("model", 1, 0.1),
        Step(0),
        Zero("optimizer", 0),
    ),
)

# Unfrozen between forward and backward, where FSDP2 has whole parameters in the model: the next step trains the head.
UNFROZEN_BETWEEN = Program(
    seed=9,
    models=(Model("Mlp"),),
    optimizers=(Optimizer("SGD", (Slice(0, "all"),)),),
    loaders=(Loader(rows=60, batch=12),),
    body=(
        When("at", 1, 0, (Freeze(0, "head", True),)),
        Forward(0, 0, 0),
        Freeze(0, "all", False),
        Backward((0,)),
        Clip("model", 0, 100.0),
        Step(0),
        Zero("optimizer", 0),
    ),
)

# A layer that is unfrozen in mid-window has a gradient of the last pass only, in another dtype than the others.
UNFROZEN_IN_BF16 = Program(
    seed=5,
    models=(Model("Mlp"),),
    optimizers=(Optimizer("SGD", (Slice(0, "all"),)),),
    loaders=(Loader(rows=72, batch=12),),
    body=(
        When("at", 1, 0, (Freeze(0, "head", True),)),
        When("at", 3, 0, (Freeze(0, "head", False),)),
        Accumulate((0,), (Forward(0, 0, 0), Backward((0,)), Clip("model", 0, 0.1), Step(0), Zero("optimizer", 0))),
    ),
    window=2,
    precision="bf16",
)

# A mean over the tokens of packed rows, saved on one process in the middle of a window: on several, each rank took all that
# was counted before for what it had counted itself.
PACKED_WINDOW_RESUMED = Program(
    seed=27,
    models=(Model("Documents"),),
    optimizers=(Optimizer("SGD", (Slice(0, "all"),)),),
    loaders=(Loader(rows=9, batch=12, kind="packed"),),
    body=(Accumulate((0,), (Forward(0, 0, 0), Backward((0,)), Step(0), Zero("optimizer", 0))),),
    window=2,
    save_at=0,
)

# Two models in windows: after a resume the first one's backward pass reduces what the checkpoint holds of the second one.
TWO_MODELS_RESUMED = Program(
    seed=6,
    models=(Model("Mlp"), Model("Mlp")),
    optimizers=(Optimizer("SGD", (Slice(0, "all"),)), Optimizer("Adam", (Slice(1, "all"),))),
    loaders=(Loader(rows=48, batch=12),),
    body=tuple(
        Accumulate(
            (model,),
            (
                Forward(model, model, 0),
                Backward((model,)),
                Clip("model", model, 0.1),
                Step(model),
                Zero("optimizer", model),
            ),
        )
        for model in (0, 1)
    ),
    window=2,
    save_at=0,
)

# The loss comes from the other loader's batch, through a detached output; the last batches have other numbers of rows.
THROUGH_DETACHED = Program(
    seed=7,
    models=(Model("Mlp"), Model("Mlp")),
    optimizers=(Optimizer("SGD", (Slice(0, "all"), Slice(1, "all"))),),
    loaders=(Loader(rows=39, batch=12), Loader(rows=72, batch=12)),
    body=(
        Next(1),
        Forward(0, 0, 0),
        Backward((0,)),
        Forward(1, 1, 1, through=0, detach=True),
        Backward((1,)),
        Clip("model", 1, 100.0),
        Step(0),
        Zero("optimizer", 0),
    ),
    split_batches=False,
)

# A pipeline accumulates the gradient of a batch in several backward passes; Adagrad has states of all stages from the start.
STEPPED_BY_A_HOOK = Program(
    seed=8,
    models=(Model("Blocks"),),
    optimizers=(Optimizer("Adagrad", (Slice(0, "body"),)),),
    loaders=(Loader(rows=72, batch=24),),
    body=(ForwardBackward(0, 0), Clip("optimizer", 0, 0.5), Step(0), Zero("optimizer", 0)),
    hooks=(Hook(0, "fused"),),
    save_at=1,
)

# A layer of another stage: its stand-in got the values, and had no parameters for them.
LOADED_INTO_A_STAGE = replace(
    STEPPED_BY_A_HOOK,
    body=(ForwardBackward(0, 0), Step(0), Zero("optimizer", 0), Write("load", 0, "head")),
    hooks=(),
    save_at=None,
)

# After the first epoch stages are prepared again, with another optimizer: ranks had none of its states, of different parameters.
STAGES_PREPARED_AGAIN = replace(
    LOADED_INTO_A_STAGE,
    optimizers=(Optimizer("SGD", (Slice(0, "all"),)),),
    body=(ForwardBackward(0, 0), Step(0), Zero("optimizer", 0)),
    loop=Loop("for", (0,), epochs=2),
    afterwards=("momentum",),
)

# Under ZeRO 1 the matrices that two prepared models share were divided twice, in two ways.
SHARED_UNDER_MUON = Program(
    seed=2026113228,
    models=(Model("LayerNorm"), Model("LayerNorm", body_of=0)),
    optimizers=(Optimizer("Muon", (Slice(0, "all"),)), Optimizer("Adam", (Slice(1, "head"),))),
    loaders=(Loader(rows=24, batch=12),),
    body=(
        Forward(0, 0, 0),
        Backward((0,)),
        Clip("model", 0, 0.05),
        Step(0),
        Zero("optimizer", 0),
    ),
)

# One rank alone uses an expert in a window that is half over when that of the other model ends, and reduced all gradients.
A_WINDOW_ENDS_IN_ANOTHER = Program(
    seed=2026120652,
    models=(Model("Mlp"), Model("ListedMixture")),
    optimizers=(Optimizer("SGD", (Slice(1, "all"),)),),
    loaders=(Loader(rows=43, batch=24, kind="endless"),),
    body=(
        Next(0),
        Accumulate((0,), (Forward(0, 0, 0), Backward((0,)))),
        Accumulate(
            (1,), (Zero("optimizer", 0), Forward(1, 1, 0), Backward((1,), "int"), Clip("model", 1, 100.0), Step(0))
        ),
    ),
    loop=Loop("next", steps=4),
    window=2,
    split_batches=True,
)

# Gradients of the second model are clipped where the first one has none: the first one's next gradients kept the loss scale.
ONE_OF_TWO_CLIPPED = Program(
    seed=10,
    models=(Model("Mlp"), Model("Mlp")),
    optimizers=(Optimizer("SGD", (Slice(0, "all"),)), Optimizer("SGD", (Slice(1, "all"),))),
    loaders=(Loader(rows=48, batch=12),),
    body=(
        Forward(0, 0, 0),
        Backward((0,)),
        Step(0),
        Zero("optimizer", 0),
        Forward(1, 1, 0),
        Backward((1,)),
        Clip("optimizer", 1, 100.0),
        Step(1),
        Zero("optimizer", 1),
    ),
    precision="fp16",
)

# The second model's old gradients get the loss scale again before a pass of the first one, and seemed to take part in it.
CLEARED_IN_ANOTHERS_WINDOW = Program(
    seed=2026120905,
    models=(Model("Mlp"), Model("Mlp")),
    optimizers=(Optimizer("SGD", (Slice(1, "all"),)),),
    loaders=(Loader(rows=24, batch=12),),
    body=(
        Accumulate((0,), (Forward(0, 0, 0), Backward((0,)))),
        Accumulate((1,), (Forward(1, 1, 0), Zero("optimizer", 0), Backward((1,)), Clip("model", 1, 100.0), Step(0))),
    ),
    loop=Loop("for", (0,), epochs=2),
    window=2,
    precision="fp16",
)

# The states of the second model's parameters were divided after the first model was bound, and gathered by their owner alone.
STARTED_WITH_TWO_MODELS = Program(
    seed=7,
    models=(Model("Mlp"), Model("Mlp")),
    optimizers=(Optimizer("Muon", (Slice(0, "all"), Slice(1, "all"))),),
    loaders=(Loader(rows=24, batch=12),),
    body=(Forward(0, 0, 0), Backward((0,)), Forward(1, 1, 0), Backward((1,)), Step(0), Zero("optimizer", 0)),
    loop=Loop("for", (0,), epochs=1),
    begun=1,
)

# Two backward passes after `p.data = value`: the second one gathers the new values into the memory of the forward pass.
ASSIGNED_BEFORE_TWO_PASSES = replace(
    UNFROZEN_BETWEEN,
    seed=12,
    body=(
        Forward(0, 0, 0),
        Forward(1, 0, 0),
        When("every", 2, 0, (Write("assign", 0, "head"),)),
        Backward((0,)),
        Backward((1,)),
        Clip("model", 0, 100.0),
        Step(0),
        Zero("optimizer", 0),
    ),
)

# The weights of a batch norm are saved as they are, and those of a linear layer as a view: the one sees a later `data = value`.
ASSIGNED_TO_A_NORM = replace(
    ASSIGNED_BEFORE_TWO_PASSES,
    models=(Model("Mlp"), Model("BatchNorm")),
    optimizers=(Optimizer("SGD", (Slice(1),)),),
    body=(
        Forward(0, 0, 0),
        Forward(1, 1, 0),
        Write("assign", 1, "body"),
        Backward((0,)),
        Backward((1,)),
        Clip("model", 1, 100.0),
        Step(0),
        Zero("optimizer", 0),
    ),
)

# The last pass of the first model reduces the second one's gradients, so that a rank has some of experts that only others used.
EXPERTS_OF_OTHER_RANKS = Program(
    seed=801736,
    models=(Model("Mlp"), Model("ListedMixture")),
    optimizers=(Optimizer("SGD", (Slice(0),)), Optimizer("SGD", (Slice(1),))),
    loaders=(Loader(rows=24, batch=12),),
    body=(
        Accumulate(
            (0, 1),
            (
                Forward(0, 0, 0),
                Zero("optimizer", 0),
                Zero("optimizer", 1),
                Backward((0,), "int"),
                Step(0),
                Forward(1, 1, 0),
                Backward((1,), "int"),
                Clip("model", 1, 100.0),
                Step(1),
            ),
        ),
    ),
    loop=Loop("for", (0,), epochs=2),
    window=3,
)

# A resumed run did not know yet that losses come from the loader whose end ends the last window.
RESUMED_BEFORE_A_SHORT_WINDOW = Program(
    seed=810461,
    models=(Model("Mlp"), Model("Mlp")),
    optimizers=(Optimizer("SGD", (Slice(0),)), Optimizer("SGD", (Slice(1),))),
    loaders=(Loader(rows=24, batch=12, kind="iterable"), Loader(rows=75, batch=24)),
    body=(
        Accumulate((0,), (Forward(0, 0, 1), Backward((0,), "int"), Step(0), Zero("optimizer", 0))),
        Accumulate((1,), (Forward(1, 1, 0), Backward((1,), "int"), Step(1), Zero("optimizer", 1))),
    ),
    loop=Loop("zip", (0, 1), epochs=1),
    window=4,
    save_at=0,
)

# A gradient penalty: gradients of gradients travel to the experts, too.
PENALTY_OF_EXPERTS = Program(
    seed=13,
    models=(Model("StackedMixture"),),
    optimizers=(Optimizer("SGD", (Slice(0),)),),
    loaders=(Loader(rows=31, batch=12),),
    body=(Forward(0, 0, 0, penalty=True), Forward(1, 0, 0), Backward((0, 1)), Step(0), Zero("optimizer", 0)),
)

# Of the last step one rank has no row. What it takes part with may use no expert that the one row of the others does not use.
LAST_ROW_OF_A_STREAM = Program(
    seed=14,
    models=(Model("ListedMixture"),),
    optimizers=(Optimizer("momentum", (Slice(0),)),),
    loaders=(Loader(rows=25, batch=12, kind="iterable"),),
    body=(Forward(0, 0, 0), Backward((0,)), Step(0), Zero("optimizer", 0)),
)

# What an average that is not prepared gathers is of the batches of the evaluation, and not of the training loop around it.
AVERAGE_IN_THE_LOOP = Program(
    seed=15,
    models=(Model("Mlp"), Model("Mlp")),
    optimizers=(Optimizer("SGD", (Slice(0),)), Optimizer("SGD", (Slice(1),))),
    loaders=(Loader(rows=52, batch=12, kind="sized"), Loader(rows=37, batch=12, kind="iterable")),
    body=(
        Accumulate((0,), (Forward(0, 0, 0), Backward((0,)), Step(0), Zero("optimizer", 0))),
        Accumulate((1,), (Forward(1, 1, 0), Backward((1,)), Step(1), Zero("optimizer", 1))),
        UpdateAverage(0),
        When("at", 2, 0, (EvaluateAverage(0, 1),)),
    ),
    loop=Loop("for", (0,), epochs=1),
    window=4,
    split_batches=True,
    averages=(AveragedCopy(0, "moving with buffers", prepared=False),),
)

# Experts come to an optimizer in mid-run that has stepped whole parameters alone, on the host.
EXPERTS_IN_MID_RUN = Program(
    seed=14,
    models=(Model("StackedMixture"),),
    optimizers=(Optimizer("SGD", (Slice(0, "head"),)),),
    loaders=(Loader(rows=24, batch=12),),
    body=(
        When("at", 1, 0, (AddGroup(0, Slice(0, "body")),)),
        Forward(0, 0, 0),
        Backward((0,)),
        Step(0),
        Zero("optimizer", 0),
    ),
    loop=Loop("for", (0,), epochs=1),
    offload="optimizer",
)


# The only batch is taken ahead, so that its loop has ended, and the model sees a copy of it.
ONLY_BATCH_AHEAD = Program(
    seed=18,
    models=(Model("Mlp"),),
    optimizers=(Optimizer("SGD", (Slice(0, "all"),)),),
    loaders=(Loader(rows=5, batch=12),),
    body=(Forward(0, 0, 0, penalty=True), Backward((0,)), Step(0), Zero("optimizer", 0)),
    loop=Loop("for", (0,), ahead=1),
)

# Gradients of the experts of two models were averaged over one group: ranks whose rows use other experts sent them in another
# order, and waited for each other.
EXPERTS_OF_TWO_MODELS = Program(
    seed=15,
    models=(Model("ListedMixture"), Model("ListedMixture")),
    optimizers=(Optimizer("SGD", (Slice(0), Slice(1))),),
    loaders=(Loader(rows=24, batch=8),),
    body=(Forward(0, 0, 0), Forward(1, 1, 0), Backward((0, 1)), Step(0), Zero("optimizer", 0)),
    loop=Loop("for", (0,), epochs=1),
    split_batches=True,
)

# The graph of a penalty holds no output of the model: its batch is the one that the model was called with last.
PENALTY_OF_A_BATCH_AHEAD = replace(
    ONLY_BATCH_AHEAD,
    loaders=(Loader(rows=29, batch=12, kind="iterable"),),
    body=(
        Forward(0, 0, 0, penalty=True),
        Forward(1, 0, 0),
        Backward((0,)),
        Backward((1,)),
        Step(0),
        Zero("optimizer", 0),
    ),
)


# An earlier batch of a stream was taken for the last one of its epoch, where the script had read on to the end.
GROWS_AHEAD = replace(
    grows(None),
    loaders=(Loader(rows=81, batch=16, kind="sized"),),
    loop=Loop("for", (0,), epochs=1, ahead=2),
    window=2,
    save_at=None,
)


# Compiled once more, for the last batch, while gradients of the step before are there, of which each rank has a part.
COMPILED_WITH_GRADIENTS = Program(
    seed=832058,
    models=(Model("Mlp"),),
    optimizers=(Optimizer("SGD", (Slice(0, "all"),)),),
    loaders=(Loader(rows=56, batch=12),),
    body=(Forward(0, 0, 0), Zero("optimizer", 0), Backward((0,)), Step(0)),
    loop=Loop("for", (0,), epochs=2),
    compiled=Compiled("after"),
)

# Hooks wait for the gradients of each pass, which are reduced in mid-window: also of an expert that only others have used.
HOOKS_BESIDE_EXPERTS = Program(
    seed=860524,
    models=(Model("ListedMixture"),),
    optimizers=(Optimizer("SGD", (Slice(0, "all"),)),),
    loaders=(Loader(rows=48, batch=12),),
    body=(
        Accumulate((0,), (Forward(0, 0, 0), Backward((0,), "float"), Step(0), Zero("optimizer", 0))),
        EvaluateBatch(0, 0),
    ),
    hooks=(Hook(0, "double"),),
    window=2,
)

# Hooks of parameters are called by `torch.autograd.grad`, too; the step by hand is on the averaged gradients.
HOOKS_UNDER_GRAD = Program(
    seed=830430,
    models=(Model("Mlp"),),
    optimizers=(Optimizer("SGD", (Slice(0, "all"),)),),
    loaders=(Loader(rows=48, batch=12),),
    body=(
        GradientsOf("descend", 0, 0),
        Forward(0, 0, 0),
        GradientsOf("log", 0, 0, 0),
        Backward((0,)),
        Clip("model", 0, 100.0),
        Step(0),
        Zero("optimizer", 0),
    ),
    hooks=(Hook(0, "double"),),
)


# Rank 0 alone looks at an example between a batch that was taken ahead and the gather of its loss.
LOOKED_AT_ALONE = Program(
    seed=830327,
    models=(Model("Mlp"),),
    optimizers=(Optimizer("SGD", (Slice(0, "all"),)),),
    loaders=(Loader(rows=41, batch=12),),
    body=(Forward(0, 0, 0), Alone("saliency", 0), Backward((0,)), Step(0), Zero("optimizer", 0), Record(0)),
    loop=Loop("for", (0,), epochs=2, ahead=1),
)

# A batch that is left out changes the size of a window that was known. The head is in no optimizer, and its gradient is older
# than the window, so that it is no part of the mean.
LEFT_OUT_OF_A_KNOWN_WINDOW = Program(
    seed=861911,
    models=(Model("Mlp"),),
    optimizers=(Optimizer("SGD", (Slice(0, "body"),)),),
    loaders=(Loader(rows=29, batch=12),),
    body=(
        When("every", 4, 0, (Continue(),)),
        Accumulate((0,), (Forward(0, 0, 0), Zero("optimizer", 0), Backward((0,)), Clip("model", 0, 100.0), Step(0))),
    ),
    loop=Loop("for", (0,), epochs=2),
    window=2,
)


@pytest.mark.timeout(240)
def test_programs_that_were_wrong_once() -> None:
    cases = []
    for program in (grows(None), grows("int")):
        for world, plan, then in (
            (1, "one", (1, "one")),
            (1, "one", (2, "replicate")),
            (2, "replicate", (1, "one")),
            (2, "shard", (2, "shard")),
            (2, "shard", (3, "zero2")),
            (2, "zero2", (2, "zero2")),
            (2, "zero2", (2, "shard")),
        ):
            cases.append(Case(program, world, plan, then))
    for program in (
        FROZEN_WITH_ZEROS,
        UNFROZEN_BETWEEN,
        CLEARED_BETWEEN,
        DETACHED_BEFORE_CLIP,
        UNFROZEN_IN_BF16,
        THROUGH_DETACHED,
    ):
        cases += [Case(program, 2, plan) for plan in ("replicate", "zero2", "shard")]
    cases += [Case(STEPPED_BY_A_HOOK, 2, "pp", (1, "one")), Case(LOADED_INTO_A_STAGE, 2, "pp")]
    cases.append(Case(STAGES_PREPARED_AGAIN, 2, "pp"))
    cases += [Case(A_WINDOW_ENDS_IN_ANOTHER, 2, plan) for plan in ("replicate", "zero2", "shard")]
    for program in (
        ONE_OF_TWO_CLIPPED,
        CLEARED_IN_ANOTHERS_WINDOW,
        replace(grows("int"), precision="fp16", save_at=None),
    ):
        cases += [Case(program, 1, "one"), Case(program, 2, "replicate"), Case(program, 2, "shard")]
    cases += [Case(ASSIGNED_BEFORE_TWO_PASSES, 2, plan) for plan in ("shard", "zero2")]
    cases += [Case(ASSIGNED_TO_A_NORM, 2, "shard"), Case(AVERAGE_IN_THE_LOOP, 2, "replicate")]
    cases.append(Case(GROWS_AHEAD, 1, "one"))
    cases += [Case(program, 2, "replicate") for program in (ONLY_BATCH_AHEAD, PENALTY_OF_A_BATCH_AHEAD)]
    cases += [Case(LAST_ROW_OF_A_STREAM, 2, plan) for plan in ("replicate", "zero1", "shard")]
    cases.append(Case(PENALTY_OF_EXPERTS, 2, "ep"))
    cases.append(Case(replace(PENALTY_OF_EXPERTS, models=(Model("ListedMixture"),)), 2, "ep"))
    cases.append(Case(EXPERTS_IN_MID_RUN, 2, "ep"))
    cases += [
        Case(EXPERTS_OF_OTHER_RANKS, world, plan) for world, plan in ((2, "shard"), (4, "replicate"), (4, "zero2"))
    ]
    cases.append(Case(EXPERTS_OF_TWO_MODELS, 4, "ep-replicate"))
    cases.append(Case(SHARED_UNDER_MUON, 2, "zero1"))
    cases.append(Case(STARTED_WITH_TWO_MODELS, 2, "shard"))
    cases.append(Case(RESUMED_BEFORE_A_SHORT_WINDOW, 1, "one", (2, "replicate")))
    cases.append(Case(PACKED_WINDOW_RESUMED, 1, "one", (2, "shard")))
    cases.append(Case(TWO_MODELS_RESUMED, 2, "shard", (2, "shard")))
    cases += [Case(LOOKED_AT_ALONE, 2, plan) for plan in ("replicate", "zero1")]
    cases += [Case(COMPILED_WITH_GRADIENTS, 2, plan) for plan in ("shard", "zero2")]
    cases += [Case(HOOKS_BESIDE_EXPERTS, 2, plan) for plan in ("replicate", "zero2", "shard")]
    cases.append(Case(HOOKS_BESIDE_EXPERTS, 3, "shard"))
    cases += [Case(HOOKS_UNDER_GRAD, 2, plan) for plan in ("replicate", "zero2", "shard")]
    cases += [Case(LEFT_OUT_OF_A_KNOWN_WINDOW, *place) for place in ((1, "one"), (2, "replicate"), (2, "shard"))]
    outcomes = check(cases)
    wrong = [
        f"{case.name}: {result}"
        for case, result in zip(cases, outcomes, strict=True)
        if result is None or result.kind != "equal"
    ]
    assert wrong == []
