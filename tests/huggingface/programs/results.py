"""What the programs of this folder share: small synthetic data, a tokenizer made on the spot, and the record of a run."""

import json
import os
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback

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


def language_model(vocabulary=258, positions=64, seed=0):
    """A small GPT-2 with dropout, so that a difference in the random stream is seen."""
    torch.manual_seed(seed)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": positions, "vocab_size": vocabulary}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0))


def token_rows(count, length=16):
    """Pieces of the text as rows of bytes."""
    data = list(TEXT.encode())
    rows = []
    for start in range(0, count * length, length):
        tokens = [2 + byte % 256 for byte in data[start : start + length]]
        rows.append({"input_ids": tokens, "attention_mask": [1] * length, "labels": tokens})
    return rows


def summary(state):
    """Two numbers a tensor: enough to see that weights are the same."""
    return {name: [value.double().sum().item(), value.double().norm().item()] for name, value in sorted(state.items())}


class Losses(TrainerCallback):
    """Keeps what the Trainer logs."""

    def __init__(self):
        self.logged = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Times are left out: they differ anyway."""
        left_out = ("runtime", "per_second", "total_flos", "step_time")
        numbers = {key: value for key, value in logs.items() if isinstance(value, int | float)}
        self.logged.append({key: value for key, value in numbers.items() if not any(word in key for word in left_out)})


def write(folder, **values):
    """FOLDER/rank_N.json."""
    rank = os.environ.get("RANK", "0")
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"rank_{rank}.json").write_text(json.dumps(values), encoding="utf-8")


def finish(folder, trainer, losses, **more):
    """Writes what a Trainer's run ended with."""
    state = trainer.accelerator.get_state_dict(trainer.model)
    write(folder, logged=losses.logged, weights=summary(state), steps=trainer.state.global_step, **more)
