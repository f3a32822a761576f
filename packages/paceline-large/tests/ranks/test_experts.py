"""Expert parallelism gives the numbers of one process, under each plan with it, and its checkpoints go into any other width."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import pytest
import torch
from parity_models import Mixture, loss_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, TrainError
from paceline.testing import run_ranks
from paceline.world.sharded import _DIVISIONS, is_sharded, whole

Plan = dict[str, Any]
BATCH, STEPS, ACCUMULATE, CLOSE = 8, 4, 2, 3e-6


class Whole(torch.optim.AdamW):
    """One that may look at whole parameters, as it does not say that it is elementwise."""


def optimizer_of(model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    # A small epsilon would make of a rounding error in a tiny gradient a whole step.
    return kind(model.parameters(), lr=0.01, eps=1e-4)


def data() -> TensorDataset:
    # The last batch lacks a sample.
    count = STEPS * BATCH - 1
    tokens = torch.randint(0, 24, (count, 7), generator=torch.Generator().manual_seed(5))
    return TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())


def copied(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The whole gradient; None of an expert of a list that no token has reached."""
    return None if gradient is None else whole(gradient).clone()


def plain(listed: bool = False) -> dict[str, Any]:
    """The reference: whole batches, no Paceline."""
    torch.manual_seed(7)
    model = Mixture(listed=listed)
    optimizer = optimizer_of(model)
    gradients: list[dict[str, torch.Tensor | None]] = []
    norms = []
    samples = data()
    for start in range(0, len(samples), BATCH * ACCUMULATE):
        window = [samples[at : at + BATCH] for at in range(start, min(len(samples), start + BATCH * ACCUMULATE), BATCH)]
        total = sum(len(x) for x, _ in window)
        for x, y in window:
            (loss_of(model(x), y) * len(x) / total).backward()
        gradients.append({name: copied(parameter.grad) for name, parameter in model.named_parameters()})
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {"gradients": gradients, "norms": norms, "weights": model.state_dict()}


class Run:
    """A training run under a plan."""

    def __init__(
        self, plan: Plan, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, seed: int = 7, listed: bool = False
    ) -> None:
        torch.manual_seed(seed)
        model = Mixture(listed=listed)
        self.accelerator = Accelerator(cpu=True, plan=plan, gradient_accumulation_steps=ACCUMULATE, split_batches=True)
        self.built = optimizer_of(model, kind)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, self.built, DataLoader(data(), BATCH))

    def train(self, save_after_first: str = "") -> dict[str, Any]:
        gradients: list[dict[str, torch.Tensor | None]] = []
        norms = []
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.forward_backward(self.model, batch, loss_of)
                if self.accelerator.sync_gradients:
                    names = dict(self.model.named_parameters())
                    gradients.append({name: copied(parameter.grad) for name, parameter in names.items()})
                    norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)))
                self.optimizer.step()
                self.optimizer.zero_grad()
            if save_after_first and len(norms) == 1 and self.accelerator.sync_gradients:
                self.accelerator.save_state(save_after_first)
        return {"gradients": gradients, "norms": norms, "weights": self.accelerator.get_state_dict(self.model)}


def divided_otherwise(run: Run) -> list[str]:
    """The parameters that an owner does not step, or that two divisions gather for it, one after the other."""
    divisions = vars(run.built)[_DIVISIONS]
    return [
        name
        for name, parameter in run.model.named_parameters()
        if sum(division.covers(parameter) for division in divisions) != 1
    ]


def differences(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """What is not alike. A stage of a pipeline has some of the gradients, and the main process alone the weights."""
    found = []
    if got["norms"] != pytest.approx(want["norms"], abs=CLOSE):
        found.append(f"norms {got['norms']}, {want['norms']}")
    for number, gradients in enumerate(got["gradients"]):
        for name, gradient in gradients.items():
            wanted = want["gradients"][number][name]
            if gradient is None or wanted is None:
                if gradient is not wanted:
                    found.append(f"gradient {number} of {name}: {gradient}, and not {wanted}")
            elif not torch.allclose(gradient, wanted, atol=CLOSE, rtol=0):
                ratio = float(gradient.norm() / wanted.norm())
                found.append(f"gradient {number} of {name}: {ratio} times as long")
    for name, weight in (got["weights"] or {}).items():
        if not torch.allclose(weight, want["weights"][name], atol=CLOSE, rtol=0):
            found.append(f"weight {name}")
    return found


# Plans of a model whose experts are one tensor, and of one with a list of them. Each axis beside ep is tried each day; what
# the night adds is the other kind of experts beside it, or another division of the same tensors.
CASES: dict[str, tuple[int, list[Plan], list[Plan]]] = {
    "two": (2, [{"ep": 2}, {"ep": 2, "zero": 3}, {"ep": 2, "zero": 2}], [{"ep": 2}, {"ep": 2, "zero": 3}]),
    "four": (
        4,
        [{"replicate": 2, "ep": 2}, {"shard": 2, "ep": 2, "zero": 1}, {"ep": 4}, {"ep": 2, "cp": 2, "zero": 3},
         {"pp": 2, "ep": 2}, {"ep": 2, "tp": 2}],
        [{"shard": 2, "ep": 2}, {"ep": 2, "cp": 2}, {"ep": 2, "tp": 2}],
    ),
    "four at night": (
        4,
        [{"shard": 2, "ep": 2}, {"ep": 2, "cp": 2}, {"ep": 2, "tp": 2, "zero": 3}],
        [{"replicate": 2, "ep": 2}, {"ep": 4}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ["two", "four", pytest.param("four at night", marks=pytest.mark.long)])
def test_gradients_norms_and_weights_are_those_of_one_process(case) -> None:
    """Also with accumulation, a last batch that does not divide, an expert without tokens, and experts of one rank alone."""
    world, stacked, listed = CASES[case]

    def work() -> list[str]:
        found = []
        for is_list, plans in ((False, stacked), (True, listed)):
            want = plain(is_list)
            for plan in plans:
                # With tp beside ep, one division of such an optimizer serves both axes.
                kind = Whole if plan == {"ep": 2, "tp": 2} else torch.optim.AdamW
                run = Run(plan, kind, listed=is_list)
                if kind is Whole:
                    found += divided_otherwise(run)
                found += [f"{plan}, listed: {is_list}: {row}" for row in differences(run.train(), want)]
                for name, parameter in run.model.named_parameters():
                    whole_rows = parameter.shape[0]
                    if ".experts." in name and not (
                        is_sharded(parameter) and parameter.to_local().shape[0] < whole_rows
                    ):
                        found.append(f"{plan}: {name} is whole on each rank")
        return found

    assert run_ranks(work, world, timeout_s=180) == [[]] * world


def test_checkpoints_go_into_any_width_and_into_one_file(tmp_path) -> None:
    """Saved at ep 2; loaded at ep 1, plain, and ep 4. The exported file is that of one process."""
    both = (False, True)  # whether the experts are a list
    saved = {listed: str(tmp_path / f"saved_{listed}") for listed in both}

    def save() -> list[str]:
        found = []
        for listed in both:
            run = Run({"ep": 2, "zero": 3}, listed=listed)
            found += differences(run.train(saved[listed]), plain(listed))
            run.accelerator.save_model(run.model, tmp_path / f"exported_{listed}")
        # An optimizer that needs whole parameters steps each on one rank.
        for plan in ({"ep": 2}, {"ep": 2, "zero": 3}):
            run = Run(plan, Whole)
            found += divided_otherwise(run)
            found += differences(run.train(), plain())
        return found

    def resume(plans: list[Plan]) -> list[str]:
        found = []
        for listed in both:
            want = plain(listed)
            want = {**want, "gradients": want["gradients"][1:], "norms": want["norms"][1:]}
            newest = saved[listed]
            for plan in plans:
                run = Run(plan, seed=8, listed=listed)
                run.accelerator.load_state(newest)
                if "tp" in plan:  # the next plan reads what this one has written
                    newest = str(tmp_path / f"saved_again_{listed}")
                    run.accelerator.save_state(newest)
                found += differences(run.train(), want)
                run.accelerator.load_model(run.model, tmp_path / f"exported_{listed}")
                for name, weight in (run.accelerator.get_state_dict(run.model) or {}).items():
                    if not torch.allclose(weight, want["weights"][name], atol=CLOSE, rtol=0):
                        found.append(f"exported {name}")
        return found

    assert run_ranks(save, 2, timeout_s=120) == [[]] * 2
    assert run_ranks(resume, 1, args=([{}],), timeout_s=120) == [[]]
    plans = [{"ep": 4}, {"ep": 2, "tp": 2}, {"replicate": 4}]
    assert run_ranks(resume, 4, args=(plans,), timeout_s=120) == [[]] * 4


class Unroutable(nn.Module):
    """Layers with lists of experts that cannot be sent to their ranks. Two ranks divide the 5 rows of a weight unevenly."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.call = call
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.call(self, x)


def load_balancing_loss_func(gate_logits, num_experts=None, top_k=2, attention_mask=None):
    """Has the name and the arguments of the function of transformers."""
    shares = torch.cat(gate_logits).softmax(-1)
    chosen = nn.functional.one_hot(shares.topk(top_k).indices, num_experts).float().sum(1)
    return num_experts * (chosen.mean(0) * shares.mean(0)).sum()


class Balanced(Mixture):
    """Returns the loss that balances its experts."""

    def forward(self, x):
        logits: list[torch.Tensor] = []
        with ExitStack() as stack:
            for block in self.blocks:
                hook = block.gate.register_forward_hook(lambda _, inputs, output: logits.append(output))
                stack.callback(hook.remove)
            super().forward(x)
        return load_balancing_loss_func(tuple(logits), 4, 2)


def router_gradients(
    model: nn.Module, loss: torch.Tensor, backward: Callable[[torch.Tensor], None]
) -> list[torch.Tensor]:
    model.zero_grad()
    backward(loss)
    return [whole(parameter.grad) for name, parameter in model.named_parameters() if ".gate." in name]


def test_evaluation_whole_parameters_and_what_is_refused() -> None:
    def refusal(error: pytest.ExceptionInfo[TrainError]) -> str:
        return error.value.code

    def work() -> None:
        for listed in (False, True):
            torch.manual_seed(7)
            single = Mixture(listed=listed)
            run = Run({"ep": 2}, listed=listed)
            accelerator = run.accelerator
            tokens = data()[:3][0][accelerator.process_index :]
            with torch.no_grad():
                want = single(tokens)
                # Ranks have other numbers of tokens.
                torch.testing.assert_close(run.model(tokens), want)
                with accelerator.full_parameters(run.model):
                    if accelerator.is_main_process:  # it computes alone
                        torch.testing.assert_close(run.model(tokens), want)
            with pytest.raises(TrainError) as error, accelerator.join_uneven_inputs([run.model]):
                pass
            assert refusal(error) == "experts-uneven"

        # A product of two means over tokens is that of the whole batch, also if one of the ranks has no sample.
        torch.manual_seed(7)
        single = Balanced()
        accelerator = Accelerator(cpu=True, plan={"ep": 2}, split_batches=True)
        model, loader = accelerator.prepare(deepcopy(single), DataLoader(TensorDataset(data()[:5][0]), 4))
        for (rows,), whole_batch in zip(loader, (data()[:4][0], data()[4:5][0]), strict=True):
            got = router_gradients(model, model(rows), accelerator.backward)
            wanted = router_gradients(single, single(whole_batch), torch.Tensor.backward)
            torch.testing.assert_close(got, wanted, atol=CLOSE, rtol=0)
        # Parts of sequences are filled up.
        accelerator = Accelerator(cpu=True, plan={"cp": 2})
        model = accelerator.prepare(deepcopy(single))
        with pytest.raises(TrainError) as error:
            model(data()[:2][0])
        assert refusal(error) == "experts-sequence"
        # A loss of another form under this name.
        accelerator = Accelerator(cpu=True, plan={"ep": 2})
        model = accelerator.prepare(deepcopy(single))
        names = Balanced.forward.__globals__
        known = names["load_balancing_loss_func"]
        names["load_balancing_loss_func"] = lambda *args: 2 * known(*args)
        with pytest.raises(TrainError) as error:
            model(data()[:2][0])
        assert refusal(error) == "experts-balance"
        names["load_balancing_loss_func"] = known

        # A list is declared by the option.
        options = {"experts": {"modules": "*parts"}}
        accelerator = Accelerator(cpu=True, plan={"ep": 2}, options=options)
        layer = Unroutable(lambda layer, x: layer.parts[0](x) + layer.parts[1](x))
        layer.parts = layer.experts
        del layer.experts
        wanted = layer(torch.ones(3, 5))
        layer = accelerator.prepare(layer)
        assert is_sharded(layer.parts[0].weight)
        torch.testing.assert_close(layer(torch.ones(3, 5)), wanted)
        accelerator = Accelerator(cpu=True, plan={"ep": 2})

        calls = {
            "keyword": lambda layer, x: layer.experts[0](input=x),
            "other tokens": lambda layer, x: layer.experts[layer.runs % 2](x),
            "more calls": lambda layer, x: (
                layer.experts[0](layer.experts[0](x)) if layer.runs == 2 else layer.experts[0](x)
            ),
        }
        for call in calls.values():
            layer = accelerator.prepare(Unroutable(call))
            with pytest.raises(TrainError) as error:
                layer(torch.ones(3, 5))
            assert refusal(error) == "experts-call"
        layer = accelerator.prepare(Unroutable(lambda layer, x: layer.experts[0](nn.functional.dropout(x))))
        with pytest.raises(TrainError) as error:
            layer.experts[1](torch.ones(3, 5))
        assert refusal(error) == "experts-call"
        # The first run of the layer draws random numbers that the second one draws again.
        torch.manual_seed(3)
        layer(torch.ones(3, 5))
        drawn = torch.rand(())
        torch.manual_seed(3)
        nn.functional.dropout(torch.ones(3, 5))
        assert drawn == torch.rand(())

    run_ranks(work, 2)
