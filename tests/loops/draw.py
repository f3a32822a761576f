"""Draws programs: `draw(seed)` gives the same one for the same seed.

    parts      models, optimizers over parts of them, loaders and the loop that takes their batches
    losses     what is computed, and which models it trains
    order      where backward, clipping, steps and clearing stand to each other
    extras     what happens now and then: evaluation, freezing, skipped batches, new parameter groups, a save

What has no clear meaning is not drawn: a window whose last micro-batch is skipped, gradients that are cleared between two
backward passes of a window, a window over loaders that end at different times. A few programs are wrong in plain PyTorch, too
(a loss without any trained parameter); whoever runs them asks `plain` first.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from loops.draw_low import draw_low
from loops.draw_more import draw_more
from loops.programs import (
    Accumulate,
    AddGroup,
    AveragedCopy,
    Backward,
    Clip,
    Continue,
    Edit,
    Evaluate,
    EvaluateAverage,
    EvaluateBatch,
    Forward,
    ForwardBackward,
    Freeze,
    Hook,
    HookKind,
    Loader,
    Loop,
    Model,
    Next,
    Optimizer,
    Prepare,
    Program,
    Rate,
    Read,
    Recall,
    Record,
    Remember,
    Scheduler,
    SchedulerStep,
    Slice,
    Statement,
    Step,
    UpdateAverage,
    UpdateBatchNorm,
    When,
    Write,
    WriteKind,
    Zero,
    at_place,
    before,
    models_of,
    replaced,
    statements,
    uses,
)
from loops.script import AVERAGES, EDITS, OPTIMIZERS, SCHEDULERS
from loops.zoo import BODIES, TIES

Body = tuple[Statement, ...]

BATCH = 12  # a batch size that is split over ranks must be a multiple of their number


# How often each kind of a write is drawn; "keep" comes with those that use the copy.
WRITES: dict[WriteKind, int] = {
    "multiply": 3,
    "data": 2,
    "copy": 2,
    "clamp": 3,
    "assign": 1,
    "constant": 2,
    "draw": 2,
    "load": 2,
    "load all": 2,
    "from": 3,
    "descend": 2,
    "average": 2,
    "blend": 2,
}


@dataclass
class Loss:
    """One backward call, and what belongs to it.

    Attributes:
        before: statements that must stand before the forward pass, such as freezing a critic; `after`: after the backward.
        trains: the models that gradients reach.
    """

    forwards: Body
    backward: Statement
    trains: set[int]
    before: Body = ()
    after: Body = ()


def draw(seed: int, shuffles: bool = False, kind: str = "") -> Program:
    """The program of a seed.

    Args:
        shuffles: whether loaders may shuffle.
        kind: one of `draw_low.KINDS` that the program is to be of, or "none" of them, as libraries with other names have none.
    """

    def drawn(own: random.Random) -> Program:
        return _Drawing(own, seed, shuffles).program()

    program = draw_low(seed, drawn(random.Random(seed)), drawn, kind)
    return program if kind == "none" else draw_more(seed, program)


class _Drawing:
    def __init__(self, random_: random.Random, seed: int, shuffles: bool) -> None:
        self.random = random_
        self.seed = seed
        self.shuffles = shuffles
        self.window = 1
        self.style = "none"

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def program(self) -> Program:
        self._choose_windows()
        self.precision = self.random.choices(["no", "bf16", "fp16"], [92, 4, 4])[0]
        self._draw_models()
        self._draw_optimizers()
        self._draw_loaders()
        losses = self._draw_losses()
        body = self._ordered(losses)
        body = self._with_extras(body, losses)
        program = Program(
            seed=self.seed,
            models=tuple(self.models),
            optimizers=tuple(self.optimizers),
            loaders=tuple(self.loaders),
            body=body,
            loop=self.loop,
            schedulers=tuple(self.schedulers),
            hooks=self._hooks(losses),
            window=self.window,
            split_batches=self.split,
            precision=self.precision,  # type: ignore[arg-type]
        )
        program = self._with_writes(self._with_save(program))
        # Last, so that the programs of earlier seeds stay the same.
        program = self._with_batches_ahead(self._with_masks(self._with_offload(self._with_muon(program))))
        program = self._with_loose_parameter(self._with_batches_again(self._with_kept_batches(program)))
        program = replace(program, begun=self.random.choice([1, 2]) if self.chance(0.15) else 0)
        program = self._with_memory(self._with_average(self._with_penalty(self._with_edits(program))))
        program = self._with_new_optimizers(self._with_two_accelerators(self._with_late_model(program)))
        return self._with_plain_save(program)

    def _with_batches_ahead(self, program: Program) -> Program:
        """A loop that takes batches before it uses them. It is not saved: at the end of an epoch a save leaves them out."""
        loop = program.loop
        is_simple = loop.kind == "for" and program.save_at is None and len(program.loaders) == 1
        # A batch that is left out may live on in what was computed from it, and seems to wait.
        if not is_simple or any(isinstance(each, Continue) for each in statements(program.body)):
            return program
        ahead = self.random.choice([1, 1, 2])
        # In a shorter epoch the first window of the run ends too early, which is told.
        if program.loaders[0].rows // program.loaders[0].batch <= ahead + 1 or not self.chance(0.3):
            return program
        return replace(program, loop=replace(loop, ahead=ahead))

    def _with_batches_again(self, program: Program) -> Program:
        """A loop that uses batches again which it has kept. Not with windows: more follows the batch that ends them."""
        loop = program.loop
        is_simple = loop.kind == "for" and not loop.ahead and program.window == 1
        if (
            not is_simple
            or any(isinstance(each, Continue) for each in statements(program.body))
            or not self.chance(0.3)
        ):
            return program
        return replace(program, loop=replace(loop, again=self.random.choice(["the one before", "another"])))

    def _with_loose_parameter(self, program: Program) -> Program:
        """Not with windows, which belong to models."""
        is_simple = program.window == 1 and program.precision == "no" and program.save_at is None
        has_groups = program.optimizers[0].kind in OPTIMIZERS
        return replace(program, loose=is_simple and has_groups and self.chance(0.12))

    def _with_kept_batches(self, program: Program) -> Program:
        """`Next` takes batches of loops that are over, in the order of which nothing is drawn."""
        if program.window > 1 or program.save_at is not None:
            return program
        taken = {each.loader for each in statements(program.body) if isinstance(each, Next)}
        loaders = list(program.loaders)
        for number, loader in enumerate(loaders):
            is_repeated = not loader.shuffle and loader.kind != "endless"
            if number in taken and is_repeated and self.chance(0.4):
                loaders[number] = replace(loader, taken=self.random.choice(["fresh", "cycle"]))
        return replace(program, loaders=tuple(loaders))

    def _with_edits(self, program: Program) -> Program:
        """Gradients, learning rates and weights that a script changes by hand, behind the last backward pass."""
        body = program.body
        flat = list(statements(body))
        behind = flat[flat.index(self._last_backward(flat)) :]
        places = [each for each in behind if isinstance(each, Clip | Step)]
        if places and self.chance(0.12):
            target = self.random.choice(places)
            model = self.random.choice(sorted(models_of(program, target)))
            kind = self.random.choice(list(EDITS))
            edit: Statement = Edit(kind, model, self.random.choice(["all", "body", "head"]))  # type: ignore[arg-type]
            if program.window > 1:
                edit = When("sync", body=(edit,))
            body = before(body, target, edit)
        if self.chance(0.08):
            rate = Rate(self.random.randrange(len(program.optimizers)), self.random.choice([0.5, 2.0]))
            body = (When("at", self.random.randint(1, 4), body=(rate,)), *body)
        if self.chance(0.06):
            body = (*body, Write("clip", self.random.randrange(len(program.models))))
        return replace(program, body=body)

    def _with_penalty(self, program: Program) -> Program:
        """The loss of some rows becomes a gradient penalty."""
        forwards = [each for each in statements(program.body) if isinstance(each, Forward) and each.through is None]
        if not forwards or program.precision != "no" or not self.chance(0.06):
            return program
        # The model gets a copy of a batch. Where a script has several at once, Paceline warns that nobody sees which one it is.
        taken = [each.loader for each in statements(program.body) if isinstance(each, Next)]
        if program.loop.ahead or program.loop.again or len({*program.loop.loaders, *taken}) > 1:
            return program
        chosen = self.random.choice(forwards)
        return replace(program, body=replaced(program.body, chosen, replace(chosen, penalty=True)))

    def _with_average(self, program: Program) -> Program:
        """An average of a model's weights, its batch norms and its loss on data of its own."""
        model = self.random.randrange(len(program.models))
        is_shared = any(each.body_of is not None for each in program.models)
        if is_shared or program.precision != "no" or program.models[model].side or not self.chance(0.12):
            return program
        # A stage of a pipeline has its own parameters, and a copy that is not prepared has all.
        prepared = program.save_at is not None or uses(program, ForwardBackward) or self.chance(0.6)
        average = AveragedCopy(model, self.random.choice(list(AVERAGES)), prepared)  # type: ignore[arg-type]
        number = len(program.loaders)
        loader = Loader(self.random.randint(13, 40), BATCH, self.random.choice(["map", "map", "iterable"]))
        looks: Body = (UpdateBatchNorm(0, number), EvaluateAverage(0, number))
        looks = looks if self.chance(0.6) else looks[1:]
        body = (*program.body, UpdateAverage(0), When("at", self.random.randint(1, 4), body=looks))
        return replace(program, averages=(average,), loaders=(*program.loaders, loader), body=body)

    def _with_memory(self, program: Program) -> Program:
        """States that are kept and loaded again later in the run, as after a loss that grew."""
        is_simple = program.precision == "no" and program.save_at is None and not uses(program, AddGroup)
        if not is_simple or not self.chance(0.08):
            return program
        begin = self.random.randint(0, 2)
        restore = When("at", begin + self.random.randint(1, 3), body=(Recall(),))
        return replace(program, body=(When("at", begin, body=(Remember(self.chance(0.5)),)), restore, *program.body))

    def _is_divisible(self, program: Program, models: set[int]) -> bool:
        """Whether all parts and statements belong to these models, or to the others."""
        flat = [each for each in statements(program.body) if not isinstance(each, Remember | Recall)]
        named = [models_of(program, each) for each in flat]
        named += [{part.model for part in optimizer.slices} for optimizer in program.optimizers]
        is_shared = any(each.body_of is not None for each in program.models)
        return not is_shared and not any(own & models and own - models for own in named)

    def _with_late_model(self, program: Program) -> Program:
        """The last model is prepared in the loop, and trained from then on."""
        late = len(program.models) - 1
        is_simple = program.window == 1 and program.precision == "no" and program.save_at is None
        if not late or not is_simple or program.hooks or program.loose or uses(program, Remember | Write):
            return program
        if not self._is_divisible(program, {late}) or not self.chance(0.4):
            return program
        begin = self.random.randint(0, 3)
        body = (When("at", begin, body=(Prepare(late),)), *_from(program, program.body, late, begin))
        return replace(program, late=late, body=body)

    def _with_two_accelerators(self, program: Program) -> Program:
        """Each has a loader of its own: neither knows the batches of the other's."""
        is_simple = program.precision == "no" and program.save_at is None and program.late is None
        if len(program.models) < 2 or not is_simple or program.loose or uses(program, Remember):
            return program
        if not self._is_divisible(program, {0}) or not self.chance(0.4):
            return program
        before = program
        if program.loop.kind == "for" and not program.loop.again and len(self.training) == 1:
            number = len(program.loaders)
            rows = replace(program.loaders[0], kind="map")
            loop = replace(program.loop, kind="zip", loaders=(0, number), ahead=0)
            body = _from_loader(program.body, number)
            program = replace(program, loop=loop, loaders=(*program.loaders, rows), body=body)
        users: dict[int, set[bool]] = {}
        for each in statements(program.body):
            if isinstance(each, Forward | ForwardBackward):
                users.setdefault(each.loader, set()).add(each.model == 0)
        ends = {program.loaders[number].batches for number in program.loop.loaders}
        # The windows of each end with its own loader alone.
        end_together = program.window == 1 or (program.loop.kind == "zip" and len(ends) == 1)
        if any(len(own) > 1 for own in users.values()) or not end_together:
            return before
        return replace(program, apart=True)

    def _with_new_optimizers(self, program: Program) -> Program:
        """Other optimizers from the second epoch on."""
        is_simple = program.precision == "no" and program.save_at is None and program.loop.kind != "next"
        is_plain = not (program.hooks or program.schedulers or program.loose or program.averages or program.apart)
        is_early = any(isinstance(each, Write) and each.early for each in statements(program.body))
        if program.late is not None or is_early or uses(program, AddGroup | Remember) or not uses(program, Zero):
            return program
        if not is_simple or not is_plain or not self.chance(0.12):
            return program
        kinds = tuple(self.random.choice(list(OPTIMIZERS)) for _ in program.optimizers)
        return replace(program, afterwards=kinds, loop=replace(program.loop, epochs=2))

    def _with_plain_save(self, program: Program) -> Program:
        """A file of state dicts at the end of an epoch; the next run begins with an epoch."""
        if program.save_at is None or program.loop.kind == "next" or uses(program, Next) or not self.chance(0.5):
            return program
        batches = min(program.loaders[number].batches or 1 for number in program.loop.loaders)
        if program.loop.again:
            return program
        loop = replace(program.loop, epochs=2)
        return replace(program, plain_save=True, loop=loop, save_at=batches - 1)

    # -- parts -------------------------------------------------------------------------------------------------

    def _choose_windows(self) -> None:
        """How micro-batches are grouped into steps.

        "none": each is a step. "accumulate": one window for all models; "each": one for each model; "hand": the loop counts.
        """
        self.style = self.random.choices(["none", "accumulate", "each", "hand"], [35, 40, 12, 13])[0]
        if self.style in ("accumulate", "each"):
            self.window = self.random.choice([1, 2, 2, 3, 4])

    def _draw_models(self) -> None:
        count = self.random.choices([1, 2, 3], [50, 38, 12])[0]
        if self.style == "each":
            count = max(2, count)
        self.models: list[Model] = []
        for number in range(count):
            body = self.random.choices(list(BODIES), [5, 2, 1, 1, 1, 1, 1, 4, 1, 1])[0]
            if self.precision != "no":
                body = "Mlp"
            model = Model(
                body=body,
                tied=body in TIES and self.chance(0.25),
                side=self.random.choices(["", "unused", "branch"], [80, 10, 10])[0],  # type: ignore[arg-type]
                frozen=self.random.choices(["", "body", "head"], [85, 9, 6])[0],  # type: ignore[arg-type]
            )
            if number and self.style != "each" and self.chance(0.08):
                model = Model(body=self.models[0].body, body_of=0)
            self.models.append(model)

    def _draw_optimizers(self) -> None:
        """One over all models, one for each, or two for the parts of one; sometimes some parameters are in none."""
        slices: list[list[Slice]] = []
        for number, model in enumerate(self.models):
            free = [
                part
                for part in ("body", "head")
                if part != model.frozen and not (part == "body" and model.body_of is not None)
            ]
            if len(free) == 1 or model.side == "branch":
                whole = (
                    [Slice(number, "all")] if model.side == "branch" and len(free) == 2 else [Slice(number, free[0])]
                )
                slices.append(whole)  # type: ignore[arg-type]
                continue
            how = self.random.choices(["all", "groups", "two", "body", "head"], [66, 8, 12, 7, 7])[0]
            if how == "groups":
                slices.append([Slice(number, "body"), Slice(number, "head")])
            elif how == "two":
                slices += [[Slice(number, "body")], [Slice(number, "head")]]
            else:
                slices.append([Slice(number, how)])  # type: ignore[arg-type]
        if len(slices) > 1 and (self.chance(0.2) or len(slices) > 3) and self.style != "each":
            slices = [[each for group in slices for each in group]]
        self.optimizers = [
            Optimizer(self.random.choices(list(OPTIMIZERS), [4, 3, 2, 3, 1, 1])[0], tuple(each)) for each in slices
        ]
        self.schedulers = [
            Scheduler(self.random.choice(list(SCHEDULERS)), number)  # type: ignore[arg-type]
            for number in range(len(self.optimizers))
            if self.chance(0.2)
        ]

    def _draw_loaders(self) -> None:
        """The loop, the loaders that train, and one or none for evaluation, which comes last."""
        self.split = self.chance(0.8)
        kind = self.random.choices(["for", "zip", "next", "inner"], [62, 14, 12, 12])[0]
        self.inner: list[int] = []
        if kind == "for":
            self.loaders = [self._loader()]
            self.loop = Loop("for", (0,), epochs=self.random.choice([1, 1, 2]))
        elif kind == "zip":
            self.loaders = [self._loader(), self._loader()]
            self.loop = Loop("zip", (0, 1), epochs=self.random.choice([1, 1, 2]))
        elif kind == "inner":
            # The body takes batches of a second loader. With windows that one does not end before the first does.
            self.loaders = [self._loader(), self._loader(endless=self.window > 1 or self.chance(0.3))]
            self.loop = Loop("for", (0,), epochs=self.random.choice([1, 1, 2]))
            self.inner = [1]
        else:
            several = self.window == 1 and self.chance(0.6)
            self.loaders = [self._loader(endless=self.chance(0.3)) for _ in range(2 if several else 1)]
            self.loop = Loop("next", (), steps=self.random.randint(4, 9))
            self.inner = list(range(len(self.loaders)))
        self.training = list(range(len(self.loaders)))
        self.evaluation: int | None = None
        if self.chance(0.25):
            self.evaluation = len(self.loaders)
            self.loaders.append(
                Loader(self.random.randint(13, 40), BATCH, self.random.choice(["map", "map", "iterable"]))
            )  # type: ignore[arg-type]

    def _loader(self, endless: bool = False) -> Loader:
        batch = self.random.choice([BATCH, BATCH, BATCH, 2 * BATCH])
        full = self.random.randint(2, 6)
        rows = batch * full + self.random.choice([0, self.random.randint(0, batch - 1)])
        kind = "endless" if endless else self.random.choices(["map", "iterable", "sized"], [70, 18, 12])[0]
        is_map = kind == "map"
        shuffle = self.shuffles and is_map and self.chance(0.3)
        return Loader(rows, batch, kind, shuffle, kind != "endless" and self.chance(0.1))  # type: ignore[arg-type]

    # -- losses ------------------------------------------------------------------------------------------------

    def _draw_losses(self) -> list[Loss]:
        """Each model is trained by at least one loss."""
        losses: list[Loss] = []
        self.names = 0
        items = self.random.choices([None, "int", "float"], [60, 32, 8])[0] if self.precision == "no" else None
        mixed = self.chance(0.1)
        pipeline = self.window == 1 and self.precision == "no" and len(self.models) == 1 and self.chance(0.25)
        for model in range(len(self.models)):
            loader = self.random.choice(self.training)
            if self.models[model].side == "branch":
                pipeline = False
            if pipeline:
                losses.append(Loss((), ForwardBackward(model, loader, self.chance(0.4)), {model}))
                continue
            number_of_losses = self.random.choices([1, 2], [80, 20])[0]
            for _ in range(number_of_losses):
                own = self.random.choice([None, items]) if mixed else items
                losses.append(self._loss(model, self.random.choice(self.training), own))
        if len(self.models) > 1 and self.chance(0.35) and not pipeline and self.style != "each":
            losses.append(self._chained())
        return losses

    def _loss(self, model: int, loader: int, items: str | None) -> Loss:
        count = 2 if self.chance(0.12) else 1
        forwards = []
        for _ in range(count):
            forwards.append(Forward(self.names, model, loader))
            self.names += 1
        names = tuple(forward.name for forward in forwards)
        return Loss(tuple(forwards), Backward(names, items), {model})  # type: ignore[arg-type]

    def _chained(self) -> Loss:
        """The first model trained through the second, as a generator through its critic."""
        loader = self.random.choice(self.training)
        forward = Forward(self.names, 1, loader, through=0)
        self.names += 1
        backward = Backward((forward.name,))
        how = self.random.choices(["frozen", "detached", "both"], [4, 2, 4 if self.window == 1 else 0])[0]
        if how == "frozen" and not self.models[1].frozen and self.models[1].body_of is None:
            freezes = (Freeze(1, "all", True),)
            return Loss((forward,), backward, {0}, freezes, (Freeze(1, "all", False),))
        if how == "both" and self.window == 1:
            return Loss((forward,), backward, {0, 1})
        return Loss((replace(forward, detach=True),), backward, {1})

    # -- order -------------------------------------------------------------------------------------------------

    def _ordered(self, losses: list[Loss]) -> Body:
        """The statements of a micro-batch, in one of the orders that people write."""
        takes = tuple(Next(loader) for loader in self.inner)
        if self.style == "each":
            parts: list[Statement] = []
            for model in range(len(self.models)):
                own = [loss for loss in losses if loss.trains == {model}]
                parts.append(Accumulate((model,), self._sequence(own, self._optimizers_of({model}))))
            return (*takes, *parts)
        body = self._sequence(losses, list(range(len(self.optimizers))))
        if self.style == "accumulate":
            everything = tuple(range(len(self.models)))
            endless = all(self.loaders[loader].kind == "endless" for loader in self.inner)
            inside = self.chance(0.7) and (endless or self.window == 1)
            if inside:
                return (Accumulate(everything, (*takes, *body)),)
            return (*takes, Accumulate(everything, body))
        return (*takes, *body)

    def _optimizers_of(self, models: set[int]) -> list[int]:
        return [n for n, each in enumerate(self.optimizers) if {part.model for part in each.slices} & models]

    def _sequence(self, losses: list[Loss], optimizers: list[int]) -> Body:
        together = len(losses) == 1 or self.chance(0.4) or self.style == "hand"
        zero_place = self.random.choices(["end", "head", "between", "never"], [56, 24, 14, 6])[0]
        to_none = self.chance(0.85)
        zero_how = self.random.choices(["optimizer", "model", "hand"], [70, 18, 12])[0]
        windowed = self.window > 1 and self.style in ("accumulate", "each")
        if self.style == "hand":
            zero_place = "end"
        if windowed and zero_place in ("head", "between"):
            zero_how = "optimizer"
        self.clip_kind = self.random.choices(["", "model", "all", "optimizer"], [30, 35, 15, 20])[0]
        if self.style == "each" and self.clip_kind == "all":
            self.clip_kind = "model"

        def zeros(chosen: Iterable[int]) -> list[Statement]:
            cleared = self._zeros(list(chosen), zero_how, to_none)
            if windowed and zero_how != "optimizer" and cleared:
                return [When("sync", body=tuple(cleared))]
            return cleared

        body: list[Statement] = []
        if zero_place == "head":
            body += zeros(optimizers)
        if together:
            for loss in losses:
                body += [*loss.before, *loss.forwards]
                if loss.after:  # the graph of a frozen model is recorded; it may be thawed before the backward pass
                    body += loss.after
            if zero_place == "between":
                body += zeros(optimizers)
            for loss in losses:
                body.append(loss.backward)
            body += self._clips_and_steps(optimizers)
            if zero_place == "end":
                body += zeros(optimizers)
            return self._by_hand(body)
        left = set(optimizers)
        for number, loss in enumerate(losses):
            body += [*loss.before, *loss.forwards]
            if zero_place == "between" and (number == 0 or not windowed):
                body += zeros(optimizers if windowed else self._optimizers_of(loss.trains) or optimizers)
            body += [loss.backward, *loss.after]
            later = (
                set().union(*(other.trains for other in losses[number + 1 :])) if number + 1 < len(losses) else set()
            )
            ready = [n for n in sorted(left) if not ({part.model for part in self.optimizers[n].slices} & later)]
            if number + 1 == len(losses):
                ready = sorted(left)
            left -= set(ready)
            if ready:
                body += self._clips_and_steps(ready)
            if zero_place == "end" and ready:
                body += zeros(ready)
        return tuple(body)

    def _zeros(self, optimizers: list[int], how: str, to_none: bool) -> list[Statement]:
        if how == "optimizer":
            return [Zero("optimizer", number, to_none) for number in optimizers]
        models = sorted({part.model for number in optimizers for part in self.optimizers[number].slices})
        return [Zero(how, model, to_none or how == "hand") for model in models]  # type: ignore[arg-type]

    def _clips_and_steps(self, optimizers: list[int]) -> list[Statement]:
        limit = self.random.choice([0.05, 0.5, 100.0])
        by = self.random.choices(["norm", "value"], [88, 12])[0]
        if by == "value":
            limit = 0.02
        models = sorted({part.model for number in optimizers for part in self.optimizers[number].slices})
        clips: list[Statement] = []
        if self.clip_kind == "all":
            clips = [Clip("all", 0, limit, by)]  # type: ignore[arg-type]
        elif self.clip_kind == "model":
            clips = [Clip("model", model, limit, by) for model in models]  # type: ignore[arg-type]
        elif self.clip_kind == "optimizer":
            clips = [Clip("optimizer", number, limit, by) for number in optimizers]  # type: ignore[arg-type]
        steps: list[Statement] = []
        if self.clip_kind == "optimizer" and self.chance(0.3):
            # One after the other: clip, step, clip, step.
            for clip, number in zip(clips, optimizers, strict=True):
                steps += [clip, Step(number)]
            clips = []
        if not steps:
            steps = [Step(number) for number in optimizers]
            if self.chance(0.2):
                self.random.shuffle(steps)
        reads: list[Statement] = []
        if self.chance(0.15) and self.precision == "no":
            reads = [Read(model) for model in models]
            if self.window > 1 and self.style in ("accumulate", "each"):
                reads = [When("sync", body=tuple(reads))]
        schedules: list[Statement] = [
            SchedulerStep(number) for number, each in enumerate(self.schedulers) if each.optimizer in optimizers
        ]
        return [*reads, *clips, *steps, *schedules] if self.chance(0.6) else [*clips, *reads, *steps, *schedules]

    def _by_hand(self, body: list[Statement]) -> Body:
        """With hand-made accumulation, clips, steps and clearing wait for every second or third batch."""
        if self.style != "hand":
            return tuple(body)
        number = self.random.choice([2, 2, 3])
        last = max(place for place, each in enumerate(body) if isinstance(each, Backward | ForwardBackward))
        return (*body[: last + 1], When("every", number, number - 1, tuple(body[last + 1 :])))

    # -- extras ------------------------------------------------------------------------------------------------

    def _with_extras(self, body: Body, losses: list[Loss]) -> Body:
        if self.window == 1 and self.chance(0.12):
            body = self._with_large(body)
        if self.chance(0.12):
            body = self._with_skip(body)
        forwards = [each for each in statements(body) if isinstance(each, Forward)]
        single = len(self.training) == 1 and self.evaluation is None and self.loop.kind == "for"
        if forwards and single and self.chance(0.4):
            body = (*body, Record(self.random.choice(forwards).name))
            if any(
                isinstance(each, When) and each.body and isinstance(each.body[-1], Continue)
                for each in statements(body)
            ):
                body = body[:-1]
        if self.evaluation is not None:
            model = self.random.randrange(len(self.models))
            if self.chance(0.5):
                body = (*body, When("every", 3, 2, (Evaluate(model, self.evaluation),)))
            else:
                body = (*body, Next(self.evaluation), EvaluateBatch(model, self.evaluation))
        body = self._with_freezing(body)
        return self._with_group(body)

    def _with_large(self, body: Body) -> Body:
        """A step that is skipped after clipping."""
        flat = list(statements(body))
        clips = [each for each in flat if isinstance(each, Clip) and each.by == "norm"]
        if not clips:
            return body
        zeros = tuple(Zero("model", model) for model in range(len(self.models)))
        skip = When("large", round(self.random.uniform(0.2, 1.5), 2), body=(*zeros, Continue()))
        return _after(body, clips[-1], skip, last_backward=self._last_backward(flat))

    def _last_backward(self, flat: list[Statement]) -> Statement:
        return [each for each in flat if isinstance(each, Backward | ForwardBackward)][-1]

    def _with_skip(self, body: Body) -> Body:
        """Batches that are left out by `continue`, but never the last of an epoch, before or inside of `accumulate`."""
        if self.style == "each" or self.style == "hand" or self.loop.kind == "next":
            return body
        ends = [self.loaders[number].batches or 99 for number in self.loop.loaders]
        batches = min(ends)
        last_steps = {epoch * batches + batches - 1 for epoch in range(self.loop.epochs)}
        number = self.random.choice([2, 3, 4])
        rests = [rest for rest in range(number) if not any(step % number == rest for step in last_steps)]
        if not rests:
            return body
        skip = When("every", number, self.random.choice(rests), (Continue(),))
        first = body[0]
        if isinstance(first, Accumulate) and self.chance(0.6):
            return (replace(first, body=(skip, *first.body)), *body[1:])
        return (skip, *body)

    def _with_freezing(self, body: Body) -> Body:
        if not self.chance(0.1):
            return body
        model = self.random.randrange(len(self.models))
        part = self.random.choice(["body", "head"])
        if self.models[model].frozen or self.models[model].body_of is not None or self.models[model].side:
            return body
        begin = self.random.randint(1, 3)
        end = begin + self.random.randint(1, 3)
        freezes = (
            When("at", begin, body=(Freeze(model, part, True),)),
            When("at", end, body=(Freeze(model, part, False),)),
        )  # type: ignore[arg-type]
        return (*freezes, *body)

    def _with_group(self, body: Body) -> Body:
        """Parameters that were frozen or in no optimizer are given to one in mid-run."""
        free = self._parameters_in_none()
        if not free or not self.chance(0.5) or self.style == "each":
            return body
        each, frozen = self.random.choice(free)
        at = self.random.randint(1, 3)
        thaw: Body = (Freeze(each.model, each.part, False),) if frozen else ()
        return (When("at", at, body=(*thaw, AddGroup(self.random.randrange(len(self.optimizers)), each))), *body)

    def _parameters_in_none(self) -> list[tuple[Slice, bool]]:
        free = []
        taken = {part for optimizer in self.optimizers for part in optimizer.slices}
        for number, model in enumerate(self.models):
            for part in ("body", "head"):
                owned = {Slice(number, "all"), Slice(number, part)} & taken  # type: ignore[arg-type]
                if not owned and model.body_of is None and not any(other.body_of == number for other in self.models):
                    free.append((Slice(number, part), model.frozen == part))  # type: ignore[arg-type]
        return free

    def _hooks(self, losses: list[Loss]) -> tuple[Hook, ...]:
        model = self.random.randrange(len(self.models))
        if self.precision != "no" or self.models[model].frozen == "head":
            return ()
        # A hook on finished gradients sees each backward pass; with windows that has no clear meaning.
        one_pass = self.style == "none" and sum(model in loss.trains for loss in losses) == 1
        in_no_optimizer = Slice(model, "head") in [each for each, _ in self._parameters_in_none()]
        if one_pass and in_no_optimizer and self.chance(0.5):
            return (Hook(model, "fused"),)
        if not self.chance(0.1):
            return ()
        kinds: list[HookKind] = ["double", "input", "output", "input gradient", "output gradient"]
        if one_pass:
            kinds.append("clamp")
        return (Hook(model, self.random.choice(kinds)),)

    def _with_writes(self, program: Program) -> Program:
        """Weights that the script writes, at any place of the body."""
        if not self.chance(0.3):
            return program
        for _ in range(self.random.choice([1, 1, 2])):
            kind = self.random.choices(list(WRITES), list(WRITES.values()))[0]
            if program.save_at is not None and kind in ("average", "blend"):
                continue  # a checkpoint has no copies
            program = replace(program, body=self._with_write(program.body, kind))
        return program

    def _with_write(self, body: Body, kind: WriteKind) -> Body:
        model = self.random.randrange(len(self.models))
        part = "head" if kind == "load" else self.random.choice(["all", "body", "head"])
        write = Write(kind, model, part)  # type: ignore[arg-type]
        if kind == "from":
            others = [number for number in range(len(self.models)) if number != model]
            if not others:
                return body
            write = replace(write, part="head", source=self.random.choice(others))
        place = self.random.randrange(1 + len(list(statements(body))))
        before = list(statements(body))[:place]
        after = list(statements(body))[place:]
        # A parameter that was taken earlier is written for the next forward pass, not for a backward pass that is under way.
        under_way = any(isinstance(each, Forward) for each in before) and any(
            isinstance(each, Backward) for each in after
        )
        if kind not in ("load", "load all", "draw") and not under_way and self.chance(0.3):
            write = replace(write, early=True)
        if kind in ("average", "blend", "from") and under_way:
            return body  # under `shard` one is whole there and the other is not; same-numbers.md says so
        if kind in ("average", "blend"):
            keep = When("every", self.random.choice([2, 3]), 0, (replace(write, kind="keep"),))
            return (keep, *at_place(body, place, write))
        if self.chance(0.3):
            return at_place(body, place, write)
        when = self.random.choice([When("every", 2, 1), When("every", 3, 2), When("at", self.random.randint(0, 3))])
        return at_place(body, place, replace(when, body=(write,)))

    def _with_save(self, program: Program) -> Program:
        changing = any(isinstance(each, AddGroup | Freeze) for each in statements(program.body))
        if changing or program.hooks or not self.chance(0.12):
            return program
        return replace(program, save_at=self.random.randint(0, 4))

    def _with_muon(self, program: Program) -> Program:
        """One optimizer becomes Muon, which steps whole matrices."""
        if program.precision != "no" or not self.chance(0.12):
            return program
        number = self.random.randrange(len(program.optimizers))
        # A group of Muon's says more than its parameters.
        if any(isinstance(each, AddGroup) and each.optimizer == number for each in statements(program.body)):
            return program
        optimizers = list(program.optimizers)
        optimizers[number] = replace(optimizers[number], kind="Muon")
        return replace(program, optimizers=tuple(optimizers))

    def _with_masks(self, program: Program) -> Program:
        """Losses over items become losses over the rows that a mask selects."""
        if not self.chance(0.2):
            return program
        return replace(program, body=_masked(program.body))

    def _with_offload(self, program: Program) -> Program:
        if not self.chance(0.08):
            return program
        what = self.random.choices(["activations", "optimizer", "optimizer+activations"], [3, 1, 1])[0]
        return replace(program, offload=what)  # type: ignore[arg-type]


def _masked(body: Body) -> Body:
    result: list[Statement] = []
    for statement in body:
        if isinstance(statement, Accumulate | When):
            statement = replace(statement, body=_masked(statement.body))
        elif isinstance(statement, Backward) and statement.items is not None:
            statement = replace(statement, items="mask")
        result.append(statement)
    return tuple(result)


def _after(body: Body, target: Statement, new: Statement, last_backward: Statement) -> Body:
    """The body with a statement after another one, if that stands behind the last backward call."""
    result: list[Statement] = []
    seen = False
    for statement in body:
        if isinstance(statement, Accumulate | When) and target in list(statements(statement.body)):
            result.append(replace(statement, body=_after(statement.body, target, new, last_backward)))
            continue
        result.append(statement)
        seen |= statement is last_backward
        if statement is target and seen:
            result.append(new)
            target = new  # once
    return tuple(result)


def _from(program: Program, body: Body, model: int, begin: int) -> Body:
    """The body where what names a model begins at a step."""
    result: list[Statement] = []
    for statement in body:
        if isinstance(statement, When):
            statement = replace(statement, body=_from(program, statement.body, model, begin))
        elif model in models_of(program, statement):
            statement = When("from", begin, body=(statement,))
        result.append(statement)
    return tuple(result)


def _from_loader(body: Body, loader: int) -> Body:
    """The body where models but the first one get batches of a loader."""
    result: list[Statement] = []
    for statement in body:
        if isinstance(statement, Accumulate | When):
            statement = replace(statement, body=_from_loader(statement.body, loader))
        elif isinstance(statement, Forward | EvaluateBatch) and statement.model and statement.loader == 0:
            statement = replace(statement, loader=loader)
        result.append(statement)
    return tuple(result)
