"""Models of transformers that a plan has divided generate and are saved by their own methods, as scripts call them."""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from late_module import LateModule

from paceline import Accelerator, CollectiveError
from paceline.base.errors import PrepareError
from paceline.testing import run_ranks
from paceline_accelerate.divided_models import (
    encode_with_whole_models,
    generate_with_whole_models,
    resume_undivided_models,
    save_whole_models,
    sync_whole_models,
    train_divided_encoders,
)

# Loaded before ranks are forked, each of which needs two seconds for it.
gpt2 = LateModule("transformers.models.gpt2.modeling_gpt2")


def _trained(plan):
    """A language model after one step; its forward pass, and so the next step, works as before whatever was called."""
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


@pytest.mark.parametrize("positional", [False, True])
def test_a_rank_may_save_a_gathered_state_alone(positional, tmp_path: Path):
    def work():
        accelerator, model, _, _ = _trained({"zero": 3})
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            if positional:
                model.save_pretrained(tmp_path, True, state)
            else:
                model.save_pretrained(tmp_path, state_dict=state)
        accelerator.wait_for_everyone()

    run_ranks(work, world=2)
    assert (tmp_path / "model.safetensors").exists()


class Encoder(torch.nn.Sequential):
    """Has the methods of sentence-transformers' models that read parameters, or run the model, outside of training."""

    def encode(self, rows):
        return [self(row[None]).item() for row in rows]

    def save(self, path):
        torch.save({name: value.clone() for name, value in self.state_dict().items()}, Path(path) / "weights.pt")
        return self.encode(torch.ones(2, 4))  # for the model card

    @classmethod
    def load(cls, path):
        model = cls.__new__(cls)
        torch.nn.Sequential.__init__(model, torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        model.load_state_dict(torch.load(Path(path) / "weights.pt"))
        return model


class BaseTrainer:
    """Saves and loads as the trainer of sentence-transformers does: without a look at the rank, by the model's own class."""

    def __init__(self, model, should_save):
        self.model = model
        self.args = SimpleNamespace(should_save=should_save)

    def _save(self, output_dir=None, state_dict=None):
        self.model.save(output_dir)

    def _load_from_checkpoint(self, checkpoint_path):
        self.model.load_state_dict(type(self.model).load(checkpoint_path).state_dict())

    def create_model_card(self):
        if self.args.should_save:
            self.model.state_dict()


def test_a_divided_encoder_is_saved_once_runs_and_resumes(tmp_path: Path):
    def work():
        module = ModuleType(__name__)
        module.Encoder, module.BaseTrainer = Encoder, BaseTrainer
        encode_with_whole_models(module)
        train_divided_encoders(module)
        accelerator = Accelerator(cpu=True, plan={"zero": 3})
        torch.manual_seed(0)
        model = Encoder(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        wrapped = accelerator.prepare(model)
        trainer = BaseTrainer(model, accelerator.is_main_process)
        rows = torch.eye(4)
        before = model.encode(rows)
        trainer._save(tmp_path)
        accelerator.wait_for_everyone()
        with accelerator.full_parameters(wrapped, writeback=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        zeros = model.encode(rows)
        trainer._load_from_checkpoint(tmp_path, wrapped)
        return before, zeros, model.encode(rows)

    for before, zeros, after in run_ranks(work, world=2):
        assert after == before and zeros == [0.0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]
    assert torch.load(tmp_path / "weights.pt")["0.weight"].shape == (8, 4)


class SyncRefModelCallback:
    """Mixes weights as trl's callback of this name does."""

    @staticmethod
    def _sync_target_model(model, target_model, alpha):
        for target, source in zip(target_model.parameters(), model.parameters(), strict=True):
            target.data.mul_(1.0 - alpha).add_(source.data, alpha=alpha)


def test_a_reference_model_takes_weights_of_a_divided_model():
    def work():
        from torch.distributed.fsdp import fully_shard

        sync_whole_models(SimpleNamespace(SyncRefModelCallback=SyncRefModelCallback))
        accelerator = Accelerator(cpu=True, plan={"zero": 3})
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        reference = torch.nn.Linear(4, 3)
        expected = (reference.weight + model.weight).detach() / 2
        accelerator.prepare(model)
        divided = fully_shard(reference)  # as trl does
        SyncRefModelCallback._sync_target_model(model, divided, 0.5)
        return (divided.weight.full_tensor() - expected).abs().max().item()

    assert max(run_ranks(work, world=2)) < 1e-6


class Trainer:
    """Reads a checkpoint of FSDP only if it has found a plugin of FSDP, as transformers' trainer does."""

    is_fsdp_enabled = is_deepspeed_enabled = False

    def __init__(self):
        self.accelerator = SimpleNamespace(state=SimpleNamespace())

    def _load_from_checkpoint(self, folder, model=None):
        return self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.state_dict_type.name

    def _load_optimizer_and_scheduler(self, folder):
        return self.is_fsdp_enabled


def test_an_undivided_run_takes_the_checkpoint_of_a_divided_one(tmp_path: Path):
    resume_undivided_models(SimpleNamespace(Trainer=Trainer))
    trainer = Trainer()
    assert not trainer._load_from_checkpoint(tmp_path)
    assert trainer._load_optimizer_and_scheduler(None) is False
    (tmp_path / "pytorch_model_fsdp.bin").touch()
    assert trainer._load_from_checkpoint(str(tmp_path), None) == "FULL_STATE_DICT"
    assert trainer._load_optimizer_and_scheduler(tmp_path) is True
    assert not trainer.is_fsdp_enabled and not vars(trainer.accelerator.state)


def _wrapped_already(plan):
    from paceline.base import env as environment
    from paceline_accelerate.accelerator import Accelerator as ForAccelerate

    with environment.patched(plan):
        accelerator = ForAccelerate(cpu=True)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    try:
        accelerator.prepare(model)
    except PrepareError as error:
        return error.code
    return "prepared"


@pytest.mark.parametrize(("plan", "outcome"), [({}, "prepared"), ({"PACELINE_ZERO": "2"}, "prepare-kind")])
def test_a_model_that_ddp_wraps_is_refused_where_gradients_are_divided(plan, outcome):
    """accelerate prepares such a model. Under ZeRO 2 it trained to other weights, without an error."""
    assert run_ranks(_wrapped_already, world=2, args=(plan,)) == [outcome] * 2
