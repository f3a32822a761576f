"""Models of transformers that a plan has divided generate and are saved by their own methods, as scripts call them."""

from pathlib import Path

import pytest
import torch

from paceline import Accelerator, CollectiveError
from paceline.compat.divided_models import generate_with_whole_models, save_whole_models
from paceline.testing import run_ranks


def _trained(plan):
    """A language model after one step; its forward pass, and so the next step, works as before whatever was called."""
    pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    import transformers

    if not hasattr(transformers.PreTrainedModel.save_pretrained, "__wrapped__"):
        save_whole_models(transformers.modeling_utils)
        generate_with_whole_models(transformers.generation.utils)
    accelerator = Accelerator(cpu=True, plan=plan)
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 32}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **dropout, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.randint(2, 64, (4, 8), generator=torch.Generator().manual_seed(3))

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    return accelerator, accelerator.unwrap_model(model), tokens, step


def _generated_and_saved(plan, folder):
    from safetensors.torch import load_file

    accelerator, model, tokens, step = _trained(plan)
    generated = model.generate(tokens[:1], max_new_tokens=4, do_sample=False).tolist()
    is_main = accelerator.is_main_process
    model.save_pretrained(folder, is_main_process=is_main)
    loss = step()
    weights = {name: value.double().norm().item() for name, value in load_file(folder / "model.safetensors").items()}
    return generated, loss, weights if is_main else {}


@pytest.mark.parametrize("plan", [{"zero": 3}, {"tp": 2}])
def test_a_divided_model_generates_and_is_saved_whole(plan, tmp_path: Path):
    ((generated, loss, weights),) = run_ranks(_generated_and_saved, world=1, args=(None, tmp_path / "one"))
    first, second = run_ranks(_generated_and_saved, world=2, args=(plan, tmp_path / "two"))
    assert first[0] == second[0] == generated
    assert first[1] == pytest.approx(loss, rel=1e-5)
    assert first[2] == pytest.approx(weights, rel=1e-5)


def test_a_rank_that_saves_alone_is_told(tmp_path: Path):
    def work():
        accelerator, model, _, _ = _trained({"zero": 3})
        with pytest.raises(CollectiveError, match="save_pretrained") as caught:
            if accelerator.is_main_process:
                model.save_pretrained(tmp_path)
            accelerator.wait_for_everyone()
        return caught.value.code

    assert run_ranks(work, world=2) == ["collective-mismatch"] * 2
