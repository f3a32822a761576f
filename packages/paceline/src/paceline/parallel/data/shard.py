"""`shard`: FSDP2. Ranks divide parameters, gradients and optimizer states, and gather parameters unit by unit.

    apply      broadcast rank 0's values -> `fully_shard` on each unit, then on the root      (`wrapping` chooses the units)
    forward    all-gather a unit's parameters -> compute -> free them (`reshard`)
    backward   all-gather again -> compute -> reduce-scatter the gradients in float32
    step       on the shards: with Adam a rank holds 16 a / n bytes, for a parameters over n ranks

Parameters are sharded over the mesh dimension shard x cp. With replicate > 1 gradients are also averaged over replicas
(HSDP).

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, stage 3;
Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from paceline.base.env import parse_bool
from paceline.base.errors import Problem
from paceline.config.kinds import YES_NO, Kind, one_of, positive, whole
from paceline.parallel.data.wrapping import POLICIES, Wrapping, wrapping
from paceline.parallel.strategy import Averaging, Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import within
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan

# Over the ranks along these, FSDP2 divides parameters; of experts that `ep` divides, over the others.
DIVIDING_AXES = ("shard", "cp", "ep")
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = {"none": None, "float32": torch.float32, **HALVES, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SIZES = {"float16": 2, "bfloat16": 2, "float64": 8}


def _reshard(text: str) -> bool | int | str:
    if text.lower() == "auto":
        return "auto"
    if text.isdigit() and int(text) > 1:
        return int(text)
    return parse_bool(text)


_RESHARD = Kind("yes, no, auto, or a width of at least 2", _reshard, "yes|no|auto|WIDTH")
_DTYPE = one_of("auto", *DTYPES)


@dataclass(frozen=True)
class ShardOptions:
    """Options of FSDP2."""

    wrap: str | Sequence[str] = option(
        "auto", None, f"Which modules become units: {', '.join(POLICIES)}, or names of classes."
    )
    min_params: int = option(100_000_000, positive(), "For wrap=size: a unit has more parameters than this.")
    reshard: bool | int | str = option(
        "auto",
        _RESHARD,
        "Whether a unit frees its gathered parameters after the forward pass; a width divides them among so many ranks.",
    )
    param_dtype: str = option("auto", _DTYPE, "Dtype in which parameters are gathered and used.")
    reduce_dtype: str = option("auto", _DTYPE, "Dtype in which gradients are reduced.")
    output_dtype: str = option("auto", _DTYPE, "Dtype of the output of each unit.")
    prefetch: int | str = option("auto", whole(1, auto=True), "How many units ahead parameters are gathered.")
    ignored: str | Sequence[str] = option((), None, "Classes or name patterns of modules that are not divided.")
    broadcast_buffers: bool = option(
        True,
        YES_NO,
        "Buffers that a forward pass changes become those of rank 0 at the end of each window in training.",
    )


class Shard(Strategy):
    """Fully sharded data parallel over the `shard` axis (and `cp`), in hybrid form with `replicate`."""

    name = "shard"
    stage = 60
    applied = "paceline.parallel.data.shard_applied"
    axes = ("replicate", "shard")
    Options = ShardOptions
    replaces_parameters = True
    divides_steps = True
    averaging = Averaging(
        over="shard, ep and cp, then replicate; of experts without ep",
        when="in each backward pass that is not held, unit by unit; what was held at the end of the window",
        result="the rank's rows of the mean, a DTensor",
    )

    def wanted(self, plan: Plan) -> bool:
        """Used at stage 3, and at the lower stages together with tensor or pipeline parallelism."""
        return plan.fully_sharded

    def keeps_apart(self, plan: Plan) -> str:
        """Lower stages leave parameters whole."""
        return "use zero=0 or 1, under which parameters and gradients are whole"

    def wrapping(self, plan: Plan, facts: ModelFacts) -> Wrapping:
        """Returns the units of a model."""
        options = self.options(plan)
        return wrapping(facts, options.wrap, options.min_params, options.ignored)

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses names that match no module, widths that do not divide the ranks, dtypes that cannot work, and hooks."""
        return [
            *self.wrapping(plan, facts).problems,
            *_reshard_problems(plan, self.options(plan)),
            *_dtype_problems(plan, facts, self.options(plan)),
            *_hook_problems(facts),
        ]

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Names the units, whether they reshard after the forward pass, and the dtypes of communication."""
        options = self.options(plan)
        wrapping = self.wrapping(plan, facts)
        kinds = dict(facts.modules)
        classes = dict.fromkeys(kinds.get(name, "?") for name in wrapping.units)
        listed = ", ".join(classes) or "none"
        reason = (
            f"{len(wrapping.units)} modules ({listed}) are gathered one at a time, and the rest with the model itself"
        )
        if wrapping.tied:
            reason += f"; {', '.join(wrapping.tied[:3])} share parameters with others and stay with the rest"
        wrap = options.wrap
        if not isinstance(wrap, str):
            wrap = ", ".join(wrap)
        decisions = [Decision(f"shard.wrap({facts.name})", wrap, "derived", reason=reason)]
        reshard, why = resolved_reshard(plan, options)
        if options.reshard == "auto":
            decisions.append(Decision("shard.reshard", reshard, "derived", reason=why))
        param = param_dtype(plan, options)
        reduce = reduce_dtype(plan, options)
        if param is not None and options.param_dtype == "auto":
            text = f"mixed_precision={plan.precision}: gathering {param} sends half the bytes"
            decisions.append(Decision("shard.param_dtype", str(param).removeprefix("torch."), "derived", reason=text))
        if reduce is not None and options.reduce_dtype == "auto":
            decisions.append(
                Decision("shard.reduce_dtype", "float32", "derived", reason="sums of gradients lose nothing")
            )
        if plan.offloads_parameters and not plan.disk_folder:
            text = "shards, their gradients and optimizer states wait in the host's memory; on a CPU they do already"
            decisions.append(Decision("shard.offload", "all", "derived", reason=text))
        return decisions

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Divides all but quantised weights by n, or counts none on the device; at the peak two units are unsharded, and the
        gradients of one."""
        n = plan.layout.size(*DIVIDING_AXES)
        options = self.options(plan)
        own = max((_SIZES.get(dtype, 4) for dtype in facts.dtypes), default=4)  # bytes of an element of a shard
        gathered = own  # bytes of an element of a gathered parameter
        param = param_dtype(plan, options)
        if param is not None:
            gathered = param.itemsize
        scale = before.parameters / max(1, facts.parameter_bytes)  # what tensor and pipeline ranks left of the model
        sizes = sorted(_unit_sizes(self.wrapping(plan, facts), facts), reverse=True)
        reshard, _ = resolved_reshard(plan, options)
        if reshard is False:
            # Units stay whole between the passes, and are gathered for the forward pass alone.
            whole_at_once = sum(sizes)
            passes = 1
        else:
            # One unit computes while the next one is gathered; the backward pass gathers them again.
            whole_at_once = sum(sizes[:2])
            passes = 2
        # The gradients of the largest unit are there twice, in float32: as computed, and as they are reduced.
        buffers = int(scale * (whole_at_once * gathered + 2 * sizes[0] * 4))
        # Quantised weights stay whole on every rank, see `quantised.py`.
        whole_bytes = sum(row.bytes for row in facts.quantised)
        divided_bytes = max(0, before.parameters - whole_bytes)
        # The ranks along `ep`, of which n counts the number, have divided experts already.
        left = _left_by_ep(plan, facts)

        def divided(size: int) -> int:
            return ceil(size / (n * left))

        # An all-gather and a reduce-scatter each send (n - 1) / n of the data.
        once = divided_bytes * gathered // own
        sent = (n - 1) * (passes * once + before.gradients) // n
        after = replace(before, buffers=before.buffers + buffers, sent=before.sent + sent)
        parameters = divided(divided_bytes)
        gradients = divided(before.gradients)
        optimizer = divided(before.optimizer)
        if not plan.offloads_parameters:
            return replace(after, parameters=whole_bytes + parameters, gradients=gradients, optimizer=optimizer)
        # All that is divided waits in the host's memory, or on its disk: there `offload` counts the states.
        read = passes * plan.accumulate * parameters
        after = replace(after, parameters=whole_bytes, gradients=0, host_traffic=read + gradients)
        if plan.disk_folder:
            # A step reads the parameters and writes them, too.
            return replace(
                after, optimizer=optimizer, host=gradients, disk=parameters, disk_traffic=read + 2 * parameters
            )
        return replace(after, optimizer=0, host=parameters + gradients + optimizer)


# -- what the options mean -----------------------------------------------------------------------------------------------


def resolved_reshard(plan: Plan, options: ShardOptions) -> tuple[bool | int, str]:
    if options.reshard != "auto":
        return options.reshard, ""  # type: ignore[return-value]
    if plan.zero < 3:
        return False, f"zero={plan.zero} divides no parameters, so they stay whole until the backward pass is over"
    if plan.layout.pp > 1:
        return False, f"pp={plan.layout.pp}: each micro-batch would gather the stage's parameters anew"
    return True, "zero=3: parameters are divided, so a module's whole ones are freed as soon as it has computed"


def param_dtype(plan: Plan, options: ShardOptions) -> torch.dtype | None:
    if options.param_dtype != "auto":
        return DTYPES[options.param_dtype]
    return HALVES.get(plan.half)


def reduce_dtype(plan: Plan, options: ShardOptions) -> torch.dtype | None:
    if options.reduce_dtype != "auto":
        return DTYPES[options.reduce_dtype]
    # None reduces in the dtype of the gradients. A sum over many ranks in half precision would lose digits.
    if param_dtype(plan, options) in HALVES.values():
        return torch.float32
    return None


def _left_by_ep(plan: Plan, facts: ModelFacts) -> float:
    """Returns the share of the parameters that a rank has where ranks along `ep` divide the experts; 1.0 without experts."""
    if plan.layout.ep == 1 or not facts.parameters:
        return 1.0
    of_others = facts.elements_of(facts.experts) * (1 - 1 / plan.layout.ep)
    return 1 - of_others / facts.parameters


def _unit_sizes(wrapping: Wrapping, facts: ModelFacts) -> list[int]:
    """Returns the number of elements that each unit, and the root, gathers at once."""
    sizes = dict.fromkeys(("", *wrapping.units), 0)
    left_out = {*facts.aliases, *(row.name for row in facts.quantised)}
    for layer in facts.layers:
        # The innermost unit around a layer has the longest name; "" is the root.
        around = [unit for unit in sizes if within(layer.name, unit)]
        owner = max(around, key=len)
        for key, shape in layer.shapes:
            if f"{layer.name}.{key}".lstrip(".") not in left_out:
                sizes[owner] += torch.Size(shape).numel()
    return list(sizes.values())


# -- what cannot work ----------------------------------------------------------------------------------------------------


def _reshard_problems(plan: Plan, options: ShardOptions) -> list[Problem]:
    if options.reshard in ("auto", True, False):
        return []
    ranks = plan.layout.size(*DIVIDING_AXES)
    width = int(options.reshard)
    if plan.layout.size("tp", "pp") > 1:
        why = f"shard.reshard={width}, but tp={plan.layout.tp} and pp={plan.layout.pp}: parts of parts have no smaller group"
    elif ranks % width or width == ranks:
        why = f"shard.reshard={width}, but parameters are divided over {ranks} ranks"
    else:
        return []
    fix = "use shard.reshard=yes or no"
    if plan.layout.size("tp", "pp") == 1:
        widths = [str(number) for number in range(2, ranks) if ranks % number == 0]
        if widths:
            fix += f", or a width of {', '.join(widths)}"
    return [
        Problem(
            "shard-reshard",
            f"parameters cannot be kept on {width} ranks between forward and backward.",
            why=why,
            fix=fix,
        )
    ]


def _dtype_problems(plan: Plan, facts: ModelFacts, options: ShardOptions) -> list[Problem]:
    problems = []
    if len(facts.dtypes) > 1:
        problems.append(
            Problem(
                "shard-dtypes",
                f"{facts.name} has trainable parameters in several dtypes.",
                why=f"{', '.join(facts.dtypes)}: the gradients of a unit are reduced together, in one dtype",
                fix="make them one before `prepare`: `model.float()`, and mixed_precision='bf16' for speed",
            )
        )
    param = param_dtype(plan, options)
    if param == torch.float16 and plan.precision != "fp16":
        problems.append(
            Problem(
                "shard-float16",
                "gradients would be computed in float16 without a loss scale.",
                why=f"shard.param_dtype={options.param_dtype}, mixed_precision={plan.precision}: small gradients become zero",
                fix="use mixed_precision='fp16', or shard.param_dtype=bf16",
            )
        )
    if facts.sparse:
        problems.append(
            Problem(
                "shard-sparse",
                f"{facts.name} has an embedding with sparse gradients.",
                why="sparse=True: a gradient that is a list of rows cannot be divided over ranks",
                fix="build it with sparse=False",
            )
        )
    return problems


def _hook_problems(facts: ModelFacts) -> list[Problem]:
    if not facts.hooked:
        return []
    return [
        Problem(
            "shard-hooks",
            f"{facts.name} has hooks on gradients of parameters that will be divided over ranks.",
            why=f"`register_hook` or `register_post_accumulate_grad_hook` on {', '.join(facts.hooked[:3])}; other tensors take "
            "the place of these parameters, and the hooks would never be called",
            fix="register them after `prepare`, on the parameters of the model that it returns",
        )
    ]


STRATEGY = Shard()
