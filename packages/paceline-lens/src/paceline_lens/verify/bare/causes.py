"""The causes for scripts without Paceline; each is a function that returns a sentence with the evidence, or "". Pure.

`CAUSES_OF_RUN` look at the whole run and are all asked. Of `CAUSES_OF_GRADIENTS`, the first that has evidence explains a group
of gradients; the later ones rely on the earlier ones having found nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from paceline_lens.verify.bare.account import NEAR, Account, BareStep, GradientGroup
from paceline_lens.verify.bare.units import HeldUnit
from paceline_lens.verify.cause import CauseTable, Diagnosis

# What one process shows when it runs twice, and by itself; what the whole run shows; what explains a group of gradients.
CAUSES_OF_REPEAT = CauseTable("ranks")
CAUSES_OF_ONE = CauseTable("itself")
CAUSES_OF_RUN = CauseTable("ranks")
CAUSES_OF_GRADIENTS = CauseTable("ranks")


def diagnose_account(account: Account) -> list[Diagnosis]:
    """Returns what explains the differences of several ranks from one process, and what the ranks show by themselves."""
    findings = list(CAUSES_OF_RUN.findings(account))
    # Gradients of ranks that begin with other weights, or read the same samples, differ for this reason alone, and those of
    # later steps because of what has become of the weights before.
    names = {finding.cause.name for finding in findings if finding.cause.is_error}
    if names & {"model-by-rank", "data-repeated"} or (names and account.step > 1):
        return findings
    for group in account.groups:
        first = next(CAUSES_OF_GRADIENTS.findings(account, group), None)
        if first is not None:
            findings.append(Diagnosis(first.cause, f"{first.evidence} (step {account.step})"))
    return findings


def diagnose_alone(repeat: Account) -> list[Diagnosis]:
    """Returns what one process shows by itself.

    Args:
        repeat: a second run on one process, beside the first.
    """
    return [*CAUSES_OF_REPEAT.findings(repeat), *CAUSES_OF_ONE.findings(repeat)]


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= 3 * NEAR * max(abs(other), NEAR)


def _all_near(values: Sequence[float] | None, other: float) -> bool:
    return values is not None and all(_near(value, other) for value in values)


def _are_alike(values: Sequence[float]) -> bool:
    return all(_near(value, values[0]) for value in values)


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def _backward(step: BareStep) -> str:
    return f"`backward` at {step.passes[-1]['line']}" if step.passes else "the backward pass"


def _calls(step: BareStep, name: str, of: Sequence[str] = ()) -> list[int]:
    """Returns the places of calls in the order of a step; those that touch one of the parameters `of`, if there are any."""
    return [
        place
        for place, event in enumerate(step.order)
        if event["kind"] == "call" and event["name"] == name and (not of or set(of) & set(event["gradients"]))
    ]


def _reduced_at(account: Account, group: GradientGroup) -> str:
    """Returns where the script reduces these gradients, for sentences; where it does not, where it steps."""
    step = account.at(0)
    names = [unit.holders[0] for unit in group.units if 0 in unit.holders]
    places = _calls(step, "all_reduce", names)
    if places:
        return f"`all_reduce` at {step.order[places[0]]['line']}"
    return f"`step` at {step.event['line']}, {_backward(step)}"


def _is_mean(account: Account, group: GradientGroup) -> bool:
    """Returns whether the gradients are the mean of those of the ranks, clipped or not."""
    parts = group.by_rank
    if parts is None or not _are_alike(parts):
        return False
    is_clipped = bool(_calls(account.at(0), "clip_grad_norm_")) and 0 < parts[0] < 1 / account.world
    return is_clipped or _near(parts[0], 1 / account.world)


# -- the whole run ---------------------------------------------------------------------------------------------------


@CAUSES_OF_RUN.add(
    "model-by-rank",
    "Ranks start with different weights",
    "Call `torch.manual_seed` with the same seed on all ranks before the model is created, or broadcast the weights "
    "of rank 0.",
)
def model_by_rank(account: Account) -> str:
    names = account.held.unequal
    return f"{names[0]} begins with other values on some ranks ({len(names)} parameters do)" if names else ""


@CAUSES_OF_RUN.add(
    "model-by-width",
    "The model starts with other weights than on one process",
    "Seed without the rank or the number of ranks, and create the model before anything else is drawn.",
)
def model_by_width(account: Account) -> str:
    names = account.held.reseeded
    if not names or account.held.unequal:
        return ""
    return f"{names[0]} begins with the same values on all ranks, and with others on one process"


@CAUSES_OF_RUN.add(
    "data-repeated",
    "All ranks read the same samples and do the same work",
    "Give each rank its own samples: `DataLoader(..., sampler=DistributedSampler(dataset))`.",
)
def data_repeated(account: Account) -> str:
    if account.rows != "whole" or account.world == 1 or not account.num_steps:
        return ""
    first_steps = [steps[0] for steps in account.ranks]
    if len({step.loss for step in first_steps}) > 1:
        return ""
    # Where a model gathers its parameters, no rank has a gradient before the reduction.
    gathers = any(event["gathers"] for event in account.of_one.of_kind("model"))
    if not gathers and not all(_has_equal_gradients(unit, first_steps) for unit in account.held.units):
        return ""
    num_rows = len(first_steps[0].rows)
    return f"in step 1 all {account.world} ranks read the same {num_rows} samples and compute the same loss"


def _has_equal_gradients(unit: HeldUnit, steps: Sequence[BareStep]) -> bool:
    """Returns whether all ranks hold a whole parameter, and have computed the same gradient of it, or none."""
    if len(unit.holders) < len(steps) or unit.part:
        return False
    first = steps[0].raw(unit.holders[0])
    for rank, step in enumerate(steps):
        gradient = step.raw(unit.holders[rank])
        if gradient is None or first is None:
            if gradient is not first:
                return False
        elif (gradient != first).any():
            return False
    return True


@CAUSES_OF_RUN.add(
    "data-overlap",
    "Ranks read the same samples at different times",
    "Shuffle with the same seed on all ranks, and then divide: `DistributedSampler(dataset, shuffle=True)` does both.",
)
def data_overlap(account: Account) -> str:
    if account.rows in ("whole", "sliced"):
        return ""
    everything = {row for steps in (account.reference, *account.ranks) for step in steps for row in step.rows}
    of_one = Counter(row for step in account.reference for row in step.rows)
    read: dict[str, tuple[int, int]] = {}
    count = 0
    for number in range(account.num_steps):
        # Ranks of one group, such as tensor parallelism, read the same rows in the same order: they count once.
        groups = {tuple(steps[number].rows): rank for rank, steps in enumerate(account.ranks)}
        count += sum(map(len, groups))
        if count > len(everything):
            return ""  # a second epoch may have begun
        for rows, rank in groups.items():
            for row in rows:
                earlier = read.setdefault(row, (rank, number))
                if earlier[0] != rank and of_one[row] < 2:
                    return (
                        f"a sample that rank {earlier[0]} reads in step {earlier[1] + 1} "
                        f"is read by rank {rank} in step {number + 1}"
                    )
    return ""


@CAUSES_OF_RUN.add(
    "epoch-repeats",
    "Each epoch has the order of the first",
    "Call `sampler.set_epoch(epoch)` at the beginning of each epoch.",
)
def epoch_repeats(account: Account) -> str:
    for steps in account.ranks:
        epochs = {tuple(step.event["epochs"]) for step in steps}
        if len(epochs) != 1 or epochs == {()}:
            continue
        rows = [tuple(step.rows) for step in steps]
        for length in range(1, len(rows)):
            if all(rows[place] == rows[place + length] for place in range(len(rows) - length)):
                return f"the sampler shuffles, but from step {length + 1} on the samples come in the order of step 1 on"
    return ""


@CAUSES_OF_RUN.add(
    "rate-by-rank",
    "Ranks step with different learning rates",
    "Give a scheduler what is the same on all ranks: all-reduce the loss before `scheduler.step(loss)`.",
)
def rate_by_rank(account: Account) -> str:
    for number in range(account.num_steps):
        rates = [steps[number].event["rates"] for steps in account.ranks]
        if any(rate != rates[0] for rate in rates):
            shown = "; ".join(f"rank {rank}: {_shown(rate)}" for rank, rate in enumerate(rates))
            return (
                f"the learning rates of step {number + 1} differ ({shown}); "
                f"`step` at {account.ranks[0][number].event['line']}"
            )
    return ""


@CAUSES_OF_RUN.add(
    "rate-by-ranks",
    "The learning rate depends on the number of ranks",
    "Set it for the global batch, which does not change with the ranks here.",
)
def rate_by_ranks(account: Account) -> str:
    # If the script means the batch of one rank, many scale the rate by the number of ranks; verify made the batch smaller.
    if account.shared or not account.num_steps or rate_by_rank(account):
        return ""
    rates, expected = account.ranks[0][0].event["rates"], account.reference[0].event["rates"]
    for rate, other in zip(rates, expected, strict=False):
        if other and not _near(rate / other, 1):
            return f"step 1 has the rate {rate:.4g}, and {other:.4g} on one process"
    return ""


@CAUSES_OF_RUN.add(
    "weights-by-rank",
    "The weights of the ranks become different, although their gradients are the same",
    "Change weights on all ranks alike: the same rate, no noise of a rank's own, no step on one rank alone.",
)
def weights_by_rank(account: Account) -> str:
    if account.held.unequal:
        return ""
    step, name = account.weights_apart()
    # What unequal gradients do to weights is reported with the gradients.
    if not step or (account.step and account.step <= step) or rate_by_rank(account):
        return ""
    return f"{name} differs between ranks after step {step}, whose gradients were the same"


@CAUSES_OF_RUN.add(
    "copy-by-rank",
    "A copy of the weights, such as an average, differs between ranks",
    "Update it on all ranks alike and from the same weights, after the optimizer's step, or broadcast it before it is "
    "used.",
)
def copy_by_rank(account: Account) -> str:
    if account.step or account.held.unequal or account.weights_apart()[0]:
        return ""
    copies_of_ranks = [recording.of_kind("end")[-1]["copies"] for recording in account.recordings]
    held_by_all = {unit.name for unit in account.held.units if len(unit.holders) == account.world}
    for variable, copy in copies_of_ranks[0].items():
        # A rank may lack the variable, or the weight in it.
        others = [copies.get(variable, {}) for copies in copies_of_ranks]
        for name in filter(held_by_all.__contains__, copy):
            if any(_apart(other.get(name, copy[name]), copy[name]) for other in others):
                return f"`{variable}` holds another copy of {name}, which differs between ranks, although the model's does not"
    return ""


def _apart(values: Sequence[float], others: Sequence[float]) -> bool:
    size = math.sqrt(sum(value**2 for value in others))
    return math.dist(values, others) > NEAR * size / 10


@CAUSES_OF_RUN.add(
    "batch-divided",
    "Batch sizes were divided by the number of ranks, so that the global batch is that of one process",
    "Nothing has to be changed: a learning rate that grows with the ranks is not looked at here.",
    is_error=False,
)
def batch_divided(account: Account) -> str:
    return f"the script gives each of {account.world} ranks the batch of one process" if account.shared else ""


@CAUSES_OF_RUN.add(
    "batch-by-rank",
    "The global batch grows with the number of ranks",
    "To compare gradients, divide the batch size by the number of ranks in the script.",
    is_error=False,
)
def batch_by_rank(account: Account) -> str:
    if account.rows != "more":
        return ""
    count = sum(len(steps[0].rows) for steps in account.ranks)
    return (
        f"step 1 reads {count} samples on {account.world} ranks "
        f"together, and {len(account.reference[0].rows)} on one process"
    )


@CAUSES_OF_RUN.add(
    "rows-differ",
    "The ranks read other samples than one process",
    "To compare gradients, use the same order at each width: a `DistributedSampler` on one process, too.",
    is_error=False,
)
def rows_differ(account: Account) -> str:
    if account.rows != "other" or data_overlap(account):
        return ""
    return "the ranks together do not read the samples that one process reads in the same step"


@CAUSES_OF_RUN.add(
    "loss-of-one-rank",
    "A loss that the script reads is that of rank 0",
    "Average it over ranks before it is printed or decides anything; for `backward` it is right as it is.",
    is_error=False,
)
def loss_of_one_rank(account: Account) -> str:
    if account.step or not account.compares_gradients:
        return ""
    for number in range(min(account.num_steps, 2)):
        own = account.ranks[0][number].of_kind("read")
        expected = account.reference[number].of_kind("read")
        for event, other in zip(own, expected, strict=False):
            if event["line"] == other["line"] and abs(event["value"] - other["value"]) > NEAR * abs(other["value"]):
                return f"{event['line']} reads {event['value']:.5g} on rank 0, and {other['value']:.5g} on one process"
    return ""


@CAUSES_OF_RUN.add(
    "not-compared",
    "Some parameters of ranks are no part of those of one process",
    "Give the parts of a rank the initial values that one process has, to compare them.",
    is_error=False,
)
def unknown_parameters(account: Account) -> str:
    names = account.held.unknown
    return f"{names[0]} and {len(names) - 1} others" if len(names) > 1 else "".join(names)


# -- gradients -------------------------------------------------------------------------------------------------------


@CAUSES_OF_GRADIENTS.add(
    "gradient-on-some-ranks",
    "Only some ranks have a gradient for a parameter",
    "Let all ranks reduce it, with zeros where a rank did not use it; DDP does with `find_unused_parameters=True`.",
)
def on_some_ranks(account: Account, group: GradientGroup) -> str:
    if group.kind != "some":
        return ""
    unit = group.units[0]
    with_one = [rank for rank, name in unit.holders.items() if account.at(rank).gradient(name) is not None]
    return (
        f"{group.names}: only ranks {', '.join(map(str, with_one))} of "
        f"{account.world} have a gradient, {_reduced_at(account, group)}"
    )


@CAUSES_OF_GRADIENTS.add(
    "norm-gradient-partial",
    "Each rank has the gradient of its part of the sequence for a normalization layer",
    "All-reduce (sum) these gradients over the tensor parallel ranks after the last backward pass.",
)
def norm_partial(account: Account, group: GradientGroup) -> str:
    if group.kind != "partial" or not all("Norm" in unit.module for unit in group.units):
        return ""
    return f"{group.names}: the gradients of the ranks differ, and their sum is that of one process; {_backward(account.at(0))}"


@CAUSES_OF_GRADIENTS.add(
    "partial-gradient",
    "Each rank has a part of a gradient: an all-reduce in the backward pass is missing",
    "The input of a layer that is divided by columns needs an all-reduce (sum) of its gradient in the backward pass.",
)
def partial_sum(account: Account, group: GradientGroup) -> str:
    line = _backward(account.at(0))
    if group.kind == "partial":
        return f"{group.names}: the gradients of the ranks differ, and their sum is that of one process; {line}"
    has_parts = any(len(unit.holders) < account.world for unit in account.held.units)
    if has_parts and account.rows in ("whole", "sliced") and group.kind in ("own", "differs"):
        return (
            f"{group.names}: ranks that read the same samples have "
            f"different gradients of these, while others are divided; {line}"
        )
    return ""


@CAUSES_OF_GRADIENTS.add(
    "reduction-missing",
    "Gradients are not reduced: the replicas drift apart",
    "All-reduce these gradients after the last backward pass, and divide by the ranks; or wrap the model in DDP and "
    "run that.",
)
def reduction_missing(account: Account, group: GradientGroup) -> str:
    if group.kind != "own":
        return ""
    extent = (
        "all parameters"
        if len(group.units) == len(account.held.units)
        else f"of {len(account.held.units)} parameters only these"
    )
    return (
        f"{group.names}: each rank steps with the gradient of its own samples ({extent}), {_reduced_at(account, group)}"
    )


@CAUSES_OF_GRADIENTS.add(
    "reduced-too-early",
    "Gradients are reduced before the last micro-batch",
    "Reduce once, after the last backward pass of a step.",
)
def reduced_early(account: Account, group: GradientGroup) -> str:
    if group.by_pass is None or group.kind in ("factor", "none", "some"):
        return ""
    means, own = group.by_pass
    if not _near(means[-1], 0) or _near(own[-1], 0) or any(_near(mean, 0) for mean in means[:1]):
        return ""
    return (
        f"{group.names}: of {len(own)} backward passes the last one is that of "
        f"the rank alone, the first is reduced; {_reduced_at(account, group)}"
    )


@CAUSES_OF_GRADIENTS.add(
    "reduced-again",
    "Gradients that were reduced already are reduced again with those of the next micro-batch",
    "Reduce once, after the last backward pass of a step.",
)
def reduced_again(account: Account, group: GradientGroup) -> str:
    if group.by_pass is None or group.kind not in ("factor", "differs", "scaled"):
        return ""
    means, own = group.by_pass
    if not all(_near(value, 0) for value in own) or _are_alike(means):
        return ""
    return f"{group.names}: the backward passes count {_shown(means)} times; {_reduced_at(account, group)}"


@CAUSES_OF_GRADIENTS.add(
    "gradient-sum",
    "Gradients are summed over ranks, and not averaged",
    "Divide by the number of ranks after the all-reduce, or use `ReduceOp.AVG`.",
)
def gradient_sum(account: Account, group: GradientGroup) -> str:
    if group.kind != "factor" or not _near(group.factor, account.world):
        return ""
    if group.by_rank is not None:
        if not _all_near(group.by_rank, 1):
            return ""
    elif not _loss_is_right(account) or any(
        len(unit.holders) < account.world and not unit.part for unit in group.units
    ):
        return ""
    return (
        f"{group.names}: {group.factor:.3g} times those of one process "
        f"on {account.world} ranks; {_reduced_at(account, group)}"
    )


def _loss_is_right(account: Account) -> bool:
    losses = [account.at(rank).loss for rank in range(account.world)]
    found = [loss for loss in losses if loss is not None]
    expected = account.one.loss
    return bool(found) and expected is not None and _near(sum(found) / len(found), expected)


@CAUSES_OF_GRADIENTS.add(
    "divided-twice",
    "Gradients are divided twice by the number of ranks",
    "Divide the loss or the gradients, not both; DDP and FSDP average already.",
)
def divided_twice(account: Account, group: GradientGroup) -> str:
    world = account.world
    if group.kind != "factor" or not _near(group.factor, 1 / world):
        return ""
    if group.by_rank is not None:
        if not _all_near(group.by_rank, 1 / world**2):
            return ""
    elif not _loss_is_right(account):
        return ""
    return f"{group.names}: 1/{world} of those of one process on {world} ranks; {_reduced_at(account, group)}"


@CAUSES_OF_GRADIENTS.add(
    "expert-gradient-scaled",
    "The gradients of experts are too large by the ranks that send them tokens",
    "Divide them by the number of ranks: they are sums over the losses of all ranks, which no reduction averages.",
)
def expert_scaled(account: Account, group: GradientGroup) -> str:
    if group.kind != "factor" or any(len(unit.holders) == account.world or unit.part for unit in group.units):
        return ""
    holders = len(group.units[0].holders)
    if not _near(group.factor, account.world / holders) or len(group.units) == len(account.held.units):
        return ""
    return (
        f"{group.names}: {group.factor:.3g} times those of one process; each is "
        f"held by {holders} of {account.world} ranks; {_reduced_at(account, group)}"
    )


@CAUSES_OF_GRADIENTS.add(
    "scaled-before-reduction",
    "Each rank scales its gradients before they are averaged",
    "Clip after the last reduction, when all ranks have the same norm.",
)
def scaled_before(account: Account, group: GradientGroup) -> str:
    parts = group.by_rank
    if parts is None or group.kind not in ("differs", "factor") or _are_alike(parts):
        return ""
    if group.reference_by_rank is None or not _are_alike(group.reference_by_rank):
        return ""
    step = account.at(0)
    clips = _calls(step, "clip_grad_norm_")
    where = f"`clip_grad_norm_` at {step.order[clips[0]]['line']}" if clips else _reduced_at(account, group)
    return (
        f"{group.names}: the ranks count {_shown([part * account.world for part in parts])} times in the mean; {where}"
    )


@CAUSES_OF_GRADIENTS.add(
    "batch-norm-by-rank",
    "Batch norm uses the statistics of the samples of each rank",
    "Use `nn.SyncBatchNorm.convert_sync_batchnorm(model)`, or accept that results depend on the batch of a rank.",
)
def batch_norm(account: Account, group: GradientGroup) -> str:
    layers = [name for event in account.of_one.of_kind("model") for name in event["batch_norms"]]
    is_mean = group.by_rank is None or _is_mean(account, group)
    if not layers or account.rows != "divided" or group.kind not in ("differs", "factor") or not is_mean:
        return ""
    if group.reference_by_rank is not None:
        return ""
    return f"{group.names}; {layers[0]} normalizes by the samples of its rank"


@CAUSES_OF_GRADIENTS.add(
    "mean-of-means",
    "The mean over ranks gives each rank the same weight, but they have unequal numbers of items",
    "Divide the sum of a rank's losses by the mean number of items (tokens) of a rank: all-reduce the number.",
)
def mean_of_means(account: Account, group: GradientGroup) -> str:
    shares = group.reference_by_rank
    if shares is None or not _is_mean(account, group) or _are_alike(shares):
        return ""
    shares = [share / sum(shares) for share in shares]
    return (
        f"{group.names}: on one process the ranks' samples count {_shown(shares)}, "
        f"and here 1/{account.world} each; {_backward(account.at(0))}"
    )


@CAUSES_OF_GRADIENTS.add(
    "scaled-by-rank",
    "Each rank scales gradients by a number of its own",
    "Clip by the norm over all ranks: all-reduce the sum of squares of the parts first.",
)
def scaled_by_rank(account: Account, group: GradientGroup) -> str:
    if group.kind != "scaled" or not group.factors:
        return ""
    values = _shown([group.factors[rank] for rank in sorted(group.factors)])
    step = account.at(0)
    clips = _calls(step, "clip_grad_norm_")
    where = f"`clip_grad_norm_` at {step.order[clips[0]]['line']}" if clips else f"`step` at {step.event['line']}"
    return f"{group.names}: by rank {values} times those of one process; {where}"


@CAUSES_OF_GRADIENTS.add(
    "loss-scaled",
    "The loss of a rank is scaled by the number of ranks",
    "Pass the mean over the samples of this rank to `backward`; a loss over gathered values needs their gradients, "
    "too.",
)
def loss_scaled(account: Account, group: GradientGroup) -> str:
    if group.kind != "factor":
        return ""
    losses = [loss for loss in (account.at(rank).loss for rank in range(account.world)) if loss is not None]
    shown = _shown(losses)
    expected = account.one.loss
    if group.by_rank is not None:
        parts = group.reference_by_rank
        if not _is_mean(account, group) or parts is None or not _are_alike(parts):
            return ""
    # FSDP2 reduces before any hook sees a gradient: then the losses have to say it.
    elif not losses or not expected or not _near(sum(losses) / len(losses) / expected, group.factor):
        return ""
    told = f"losses {shown} and {expected:.3g} on one process; " if shown and expected is not None else ""
    return f"{group.names}: {_factor_name(account, group.factor)} times those of one process; {told}{_backward(account.at(0))}"


@CAUSES_OF_GRADIENTS.add(
    "gradient-factor",
    "Gradients are those of one process times a constant",
    "Look at what is multiplied or divided between `backward` and `step`.",
)
def constant_factor(account: Account, group: GradientGroup) -> str:
    if group.kind != "factor":
        return ""
    return f"{group.names}: {_factor_name(account, group.factor)} times those of one process; {_reduced_at(account, group)}"


def _factor_name(account: Account, factor: float) -> str:
    """Returns a factor with what it may stand for."""
    world, passes = account.world, len(account.one.passes)
    for value, name in (
        (world, "the ranks"),
        (1 / world, "1/ranks"),
        (math.sqrt(world), "the root of the ranks"),
        (1 / math.sqrt(world), "1/root of the ranks"),
        (world**2, "the ranks twice"),
        (1 / world**2, "1/ranks, twice"),
        (passes, "the micro-batches"),
        (1 / max(passes, 1), "1/micro-batches"),
    ):
        if _near(factor, value):
            return f"{factor:.4g} ({name})"
    return f"{factor:.4g}"


@CAUSES_OF_GRADIENTS.add(
    "gradient-missing",
    "Parameters have no gradient on several ranks",
    "Look at what detaches them: a collective without a backward pass, or values that were gathered.",
)
def no_gradient(account: Account, group: GradientGroup) -> str:
    if group.kind != "none":
        return ""
    return f"{group.names}: no rank has a gradient, but one process has; `step` at {account.at(0).event['line']}"


@CAUSES_OF_GRADIENTS.add(
    "gradient-differs",
    "Gradients differ from those of one process, and no sum of the ranks' own explains them",
    "Look at the loss and at the collectives in the forward pass of the named parameters.",
)
def differs(account: Account, group: GradientGroup) -> str:
    return f"{group.names}; {_reduced_at(account, group)}"


# -- one process, twice ------------------------------------------------------------------------------------------------


@CAUSES_OF_REPEAT.add(
    "unseeded-model",
    "The model starts with different weights each time",
    "Call `torch.manual_seed(0)` before you create the model.",
)
def unseeded_model(repeat: Account) -> str:
    names = repeat.held.reseeded
    return f"{names[0]} begins with other values in a second run on one process" if names else ""


@CAUSES_OF_REPEAT.add(
    "unseeded-order",
    "The order or the values of samples change from run to run",
    "Seed what shuffles and changes samples, or use `DistributedSampler`, which has a seed.",
)
def unseeded_order(repeat: Account) -> str:
    return "" if repeat.rows == "divided" else "a second run on one process reads other samples"


@CAUSES_OF_REPEAT.add(
    "unseeded-draws",
    "The same samples and weights give another gradient in a second run",
    "Seed what the loss draws, or try `torch.use_deterministic_algorithms(True)`.",
)
def unseeded_draws(repeat: Account) -> str:
    if not repeat.groups or not repeat.compares_gradients:
        return ""
    return f"{repeat.groups[0].names} has another gradient in step {repeat.step} of a second run on one process"


# -- one process -----------------------------------------------------------------------------------------------------


def _divided_by(account: Account) -> tuple[int, float]:
    """Returns the micro-batches of the first step and by what their mean losses were divided in all; (0, 0) if unknown."""
    step = account.reference[0]
    count = len(step.passes)
    if count < 2 or not all(event["is_mean"] for event in step.passes):
        return 0, 0.0
    divided = [math.prod(event["divisors"]) for event in step.passes]
    if not _are_alike(divided):
        return 0, 0.0
    kept = [1.0]
    if not _calls(step, "clip_grad_norm_"):
        for name in step.event["gradients"]:
            raw, gradient = step.raw(name), step.gradient(name)
            if raw is not None and gradient is not None and len(raw) > 1 and (gradient @ gradient):
                kept.append(float(raw @ gradient) / float(gradient @ gradient))
        kept = kept[1:] or kept
    return (count, divided[0] * kept[0]) if _are_alike(kept) else (0, 0.0)


@CAUSES_OF_ONE.add(
    "accumulation-not-divided",
    "The losses of micro-batches are added up, and not averaged",
    "Divide each loss by the number of micro-batches in a step before `backward`.",
)
def undivided_accumulation(account: Account) -> str:
    count, divided = _divided_by(account)
    if not count or not _near(divided, 1):
        return ""
    return f"{count} backward passes of a mean add up in a step, undivided; {_backward(account.reference[0])}"


@CAUSES_OF_ONE.add(
    "accumulation-divided-twice",
    "The losses of micro-batches are divided twice by their number",
    "Divide the loss or the gradients, not both; an engine that accumulates divides the loss itself.",
)
def accumulation_twice(account: Account) -> str:
    count, divided = _divided_by(account)
    if not count or not _near(divided, count**2):
        return ""
    return (
        f"{count} backward passes add up in a step, and are divided by {divided:.4g}; {_backward(account.reference[0])}"
    )


@CAUSES_OF_ONE.add(
    "optimizer-of-copies",
    "The optimizer updates copies of the parameters",
    "Create the optimizer from `model.parameters()` of the model that is trained, after it was moved or wrapped.",
)
def weights_stand_still(account: Account) -> str:
    first, last = account.reference[0].event, account.of_one.of_kind("end")[-1]
    if not any(first["rates"]) or not any(event["raw"] for event in account.reference[0].passes):
        return ""
    if any(values != last["weights"][name] for name, values in first["weights"].items()):
        return ""
    return (
        f"after {len(account.reference)} steps the weights of the model are what they were; `step` at {first['line']}"
    )
