"""What the programs of this folder share: small synthetic data, a tokenizer made on the spot, and the record of a run."""

import os
import tempfile
from pathlib import Path

import torch
from record import summary, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

TEXT = Path(os.__file__).read_text(encoding="utf-8")  # the standard library's source stands for a text


def tokenizer():
    """Bytes as tokens, with a padding token and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<eos>"]
    backend = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(special + alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ message['role'] }}: {{ message['content'] }}\n{% endif %}{% endfor %}"
    )
    return made


def language_model(vocabulary=258, positions=64, seed=0, dropout=0.1, kind="gpt2"):
    """A small GPT-2 with dropout, so that a difference in the random stream is seen; or a Llama, which has none."""
    torch.manual_seed(seed)
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    if kind == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=positions, **sizes, **ends))
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": positions, "vocab_size": vocabulary}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, **ends))


def model_of(arguments):
    """Takes what concerns the model out of a program's arguments, and returns what builds it.

    It is called after `TrainingArguments` was made, which may decide how `from_pretrained` builds.
    """
    dropout, kind = arguments.pop("dropout", 0.1), arguments.pop("model", "gpt2")
    if not arguments.pop("pretrained", False):
        return lambda: language_model(dropout=dropout, kind=kind)
    # Before anything divides it; each rank has a folder of its own.
    folder = tempfile.mkdtemp()
    language_model(dropout=dropout, kind=kind).save_pretrained(folder)
    return lambda: AutoModelForCausalLM.from_pretrained(folder)


def token_rows(count, length=16):
    """Pieces of the text as rows of bytes."""
    data = list(TEXT.encode())
    rows = []
    for start in range(0, count * length, length):
        tokens = [2 + byte % 256 for byte in data[start : start + length]]
        rows.append({"input_ids": tokens, "attention_mask": [1] * length, "labels": tokens})
    return rows


class Losses(TrainerCallback):
    """Keeps what the Trainer logs."""

    def __init__(self):
        self.logged = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Times are left out: they differ anyway."""
        left_out = ("runtime", "per_second", "total_flos", "step_time")
        numbers = {key: value for key, value in logs.items() if isinstance(value, int | float)}
        self.logged.append({key: value for key, value in numbers.items() if not any(word in key for word in left_out)})


def files(folder, pattern):
    """What lies in each folder of a pattern."""
    return {place.name: sorted(entry.name for entry in place.iterdir()) for place in sorted(Path(folder).glob(pattern))}


def finish(folder, trainer, losses, gathers=True, **more):
    """Writes what a Trainer's run ended with. Ranks: all.

    Args:
        gathers: whether whole weights can be asked for; DeepSpeed's stage 3 gives them where its config says so.
    """
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if gathers else {}
    # Under accelerate's FSDP rank 0 alone gets them.
    state = state if trainer.is_world_process_zero() else {}
    trainer.accelerator.wait_for_everyone()
    steps = trainer.state.global_step
    saved, checkpoints = files(folder, "saved"), files(folder, "out/checkpoint-*")
    numbers = {"logged": losses.logged, "weights": summary(state), "steps": steps}
    write(folder, **numbers, saved=saved, checkpoints=checkpoints, **more)
