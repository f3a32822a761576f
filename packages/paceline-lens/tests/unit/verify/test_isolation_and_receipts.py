"""`isolation` finds what acts where it may not, and `receipt` what did not arrive."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.base.errors import ConfigError, TrainError
from paceline.cli import main as command_line
from paceline.testing import run_ranks
from paceline_lens.verify import Receipt, isolation, receipt


class Attention(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask
        self.mixed = nn.Linear(8, 24)

    def forward(self, hidden, document_ids):
        query, key, value = self.mixed(hidden).chunk(3, -1)
        place = torch.arange(hidden.shape[1])
        allowed = self.mask(place[:, None], place[None, :], document_ids[:, :, None], document_ids[:, None, :])
        allowed = allowed.expand(len(hidden), len(place), len(place))
        return hidden + functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)


class TinyLanguageModel(nn.Module):
    """Two layers of attention; `mask` gets the positions and documents of the query and of the key."""

    def __init__(self, mask, between=None):
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.first, self.second = Attention(mask), Attention(mask)
        self.between = between or nn.Identity()
        self.head = nn.Linear(8, 17)

    def forward(self, input_ids, document_ids):
        hidden = self.between(self.first(self.embedding(input_ids), document_ids))
        return {"logits": self.head(self.second(hidden, document_ids))}


def window(q, k, dq, dk):
    return (k <= q) & (q - k < 3) & (dq == dk)


class OverTime(nn.Module):
    """Batch norm over all positions of all samples."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, hidden):
        return self.norm(hidden.flatten(0, 1)).view_as(hidden)


class LargestSoFar(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, hidden):
        self.largest.copy_(torch.maximum(self.largest, hidden.detach().abs().max()))
        return hidden / self.largest


class LeakingGradient(nn.Module):
    """Its output is right, and its gradient goes to the neighbour."""

    def forward(self, hidden):
        return hidden + hidden.roll(-1, 1) - hidden.roll(-1, 1).detach()


BATCH = {
    "input_ids": torch.arange(36).view(3, 12) % 17,
    "document_ids": torch.tensor([0] * 6 + [1] * 6).expand(3, 12),
}
LAWS = {"causal": True, "documents": True, "reach": 4}


def leaks_of(model, **laws):
    report = isolation(model, BATCH, **(laws or LAWS))
    return [(leak.law, leak.module) for leak in report.leaks], report


def test_a_correct_model_is_isolated():
    found, report = leaks_of(TinyLanguageModel(window, nn.Dropout(0.5)))
    assert found == [] and report.laws == ["samples", "causal", "documents", "reach"]
    # (samples, features), which has no positions.
    assert not isolation(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(5, 4)).leaks


@pytest.mark.parametrize(
    ("law", "mask"),
    [
        ("causal", lambda q, k, dq, dk: (k <= q + 1) & (q - k < 3) & (dq == dk)),
        ("documents", lambda q, k, dq, dk: (k <= q) & (q - k < 3)),
        ("reach", lambda q, k, dq, dk: (k <= q) & (dq == dk)),
    ],
)
def test_a_mask_that_lets_through(law, mask):
    found, report = leaks_of(TinyLanguageModel(mask))
    assert found and {name for name, _ in found} == {law}
    # The layer is named, and the gradient shows it as well.
    assert (law, "first") in found or (law, "second") in found
    assert (law, "") in found
    assert f"{law}: LEAKS" in str(report)


def test_documents_by_position_ids_and_by_bounds():
    class Packed(nn.Module):
        def forward(self, input_ids, position_ids=None, cu_seqlens=None):
            return input_ids[..., None].float().cumsum(-2)

    ids = BATCH["input_ids"]
    packs = (
        {"input_ids": ids, "position_ids": torch.arange(6).repeat(2).expand(3, 12)},
        {"input_ids": ids.flatten(), "cu_seqlens": torch.tensor([0, 10, 36])},
    )
    for pack in packs:
        report = isolation(Packed(), pack, documents=True, causal=True, samples=False)
        assert {leak.law for leak in report.leaks} == {"documents"}


@pytest.fixture(autouse=True)
def _weights_of_every_day():
    # A largest value shows a leak only where the changed sample has it.
    torch.manual_seed(0)


@pytest.mark.parametrize("layer", [OverTime(nn.BatchNorm1d(8)), LargestSoFar()])
def test_samples_that_act_on_each_other(layer):
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    found, report = leaks_of(TinyLanguageModel(window, layer), samples=True)
    assert found == [("samples", "between.norm" if isinstance(layer, OverTime) else "between")]
    assert ("Batch norm" in report.leaks[0].fix) == isinstance(layer, OverTime)
    # The probes leave no trace.
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    if isinstance(layer, OverTime):
        assert not isolation(TinyLanguageModel(window, layer).eval(), BATCH).leaks


def test_a_gradient_that_leaks_alone():
    found, _ = leaks_of(TinyLanguageModel(window, LeakingGradient()), causal=True)
    assert found == [("causal", "")]


def test_what_cannot_be_probed():
    class Clock(nn.Module):
        count = 0

        def forward(self, x):
            self.count += 1
            return x + self.count

    for model, batch, laws in (
        (Clock(), torch.randn(3, 4), {}),
        (nn.Linear(4, 4), torch.randn(3, 4), {"causal": True}),
        (TinyLanguageModel(window), [torch.zeros(1)], {}),
        (nn.Linear(4, 4), torch.randn(3, 4), {"documents": True}),
    ):
        with pytest.raises(ConfigError, match="verify-isolation"):
            isolation(model, batch, **laws)


def test_ranks_that_act_on_each_other():
    def probe():
        class Shared(nn.Module):
            def forward(self, x):
                mean = x.mean(0)
                torch.distributed.all_reduce(mean)
                return x - mean

        torch.manual_seed(torch.distributed.get_rank())
        models = nn.Linear(4, 4), Shared()
        reports = [isolation(model, torch.randn(3, 4), samples=False, ranks=True) for model in models]
        return [[leak.law for leak in report.leaks] for report in reports]

    assert run_ranks(probe, 2) == [[[], []], [[], ["ranks"]]]


@pytest.mark.long
def test_the_command(tmp_path, monkeypatch, capfd):
    script = (
        "import torch\nfrom torch import nn\nmodel = nn.Sequential(nn.Linear(4, 4), NORM)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nmodel(torch.randn(3, 4)).sum().backward()\noptimizer.step()\n"
    )
    (tmp_path / "layer.py").write_text(script.replace("NORM", "nn.LayerNorm(4)"))
    (tmp_path / "batch.py").write_text(script.replace("NORM", "nn.BatchNorm1d(4)"))
    (tmp_path / "none.py").write_text("print()")
    monkeypatch.chdir(tmp_path)
    words = ["verify", "--cpu", "--isolation", "samples"]
    assert command_line.main([*words, "layer.py"]) == 0
    assert "samples: isolated" in capfd.readouterr().out
    assert command_line.main([*words, "--json", "batch.py"]) == 1
    assert json.loads(capfd.readouterr().out)["leaks"][0]["kind"] == "BatchNorm1d"
    assert command_line.main([*words, "none.py"]) == 2
    assert command_line.main(["verify", "--isolation", "casual", "layer.py"]) == 2
    assert "[verify-value]" in capfd.readouterr().err


# -- receipts --------------------------------------------------------------------------------------------------------


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))


def test_a_receipt_of_weights_that_arrived():
    model, copy = model_of(), model_of()
    sent = receipt(model)
    sent.check(copy)
    sent.check(copy.state_dict())
    # Another process gets it as text, and a wrapper changes nothing.
    again = Receipt.of_dict(json.loads(json.dumps(sent.to_dict())))
    again.check({f"_orig_mod.{name}": value for name, value in copy.state_dict().items()})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.pop("2.weight"), "2.weight: it is missing"),
        (lambda state: state.update({"3.weight": torch.ones(1)}), "3.weight: it was not sent"),
        (
            lambda state: state.update({"0.weight": state["0.weight"].T.contiguous()}),
            "0.weight: the same values arrived in another order",
        ),
        (
            lambda state: state.update({"0.weight": state["0.weight"][:2]}),
            "0.weight: the shape (4, 4) was sent, and (2, 4)",
        ),
        (
            lambda state: state.update({"0.weight": state["0.weight"].bfloat16()}),
            "0.weight: float32 was sent, and bfloat16",
        ),
        (lambda state: state["0.bias"].view(torch.int32)[2].bitwise_xor_(1), "0.bias: other values arrived"),
        (lambda state: state["1.running_var"].fill_(2), "1.running_var: other values arrived"),
    ],
)
def test_what_did_not_arrive(change, told):
    sent = receipt(model_of())
    state = {name: value.clone() for name, value in model_of().state_dict().items()}
    change(state)
    with pytest.raises(TrainError) as caught:
        sent.check(state)
    assert told in str(caught.value) and "[weights-differ]" in str(caught.value)
    assert len(list(sent.differences(state))) == 1


def test_weights_that_are_stale_or_transposed():
    model = model_of()
    sent = receipt(model)
    with torch.no_grad():
        model[0].weight += 1e-3
    stale = receipt(model)
    assert list(stale.differences(sent)) == ["0.weight: other values arrived"]
    wide = {"w": torch.arange(6.0).view(2, 3)}
    assert next(receipt(wide).differences({"w": wide["w"].T})).endswith("transposed")


def test_a_receipt_of_shards_is_that_of_the_whole():
    def hand_over():
        from torch.distributed.fsdp import fully_shard

        model = model_of()
        whole = receipt(model_of())
        fully_shard(model)
        return receipt(model) == whole

    assert run_ranks(hand_over, 2) == [True, True]
