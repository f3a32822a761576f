"""Small data and models for programs of others, in place of downloads. Each function takes the folder of the program."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

WORDS = [f"w{number}" for number in range(90)]
CHAT = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} </s> {% endfor %}"


def language_model(folder: Path) -> None:
    """Makes `model`, a tiny language model with a tokenizer of words and a template of chats."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def gpt_neox(folder: Path) -> None:
    """Makes `model`, a tiny GPT-NeoX with a tokenizer of words; its query, key and value are one matrix."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    tokenizer = _tokenizer()
    torch.manual_seed(1)
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    GPTNeoXForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def gpt2(folder: Path) -> None:
    """Makes `model`, a tiny GPT-2 with a tokenizer of words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = _tokenizer()
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>", "<mask>", "user", "assistant", "system"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    }
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = CHAT
    return fast


def _text(draw: random.Random, length: int) -> str:
    return " ".join(draw.choices(WORDS, k=length))


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def _chat(draw: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": _text(draw, 5)}, {"role": "assistant", "content": _text(draw, 8)}]


def _split(folder: Path, name: str, make: Any) -> None:
    """Writes a data set with a `train` and a `test` split, which `datasets` loads by its folder."""
    draw = random.Random(0)
    for split, count in (("train", 32), ("test", 8)):
        _write(folder / name / f"{split}.jsonl", [make(draw) for _ in range(count)])


def chats(folder: Path) -> None:
    """Makes `chats`, conversations."""
    _split(folder, "chats", lambda draw: {"messages": _chat(draw)})


def _instruction(draw: random.Random) -> dict[str, str]:
    return {"instruction": _text(draw, 5), "input": _text(draw, 3), "output": _text(draw, 6)}


def instructions(folder: Path) -> None:
    """Makes `tatsu-lab/alpaca`, which `datasets` takes for the data set of this name, and `instructions.json`."""
    draw = random.Random(0)
    rows = [_instruction(draw) for _ in range(16)]
    _write(folder / "tatsu-lab" / "alpaca" / "train.jsonl", rows)
    (folder / "instructions.json").write_text(json.dumps(rows), encoding="utf-8")


def superoffload(folder: Path) -> None:
    """Makes `superoffload.json` and `zerooffload.json`, which the program's shell script writes."""
    for name, more in (("super", {"ratio": 0.8, "super_offload": True, "cpuadam_cores_perc": 0.9}), ("zero", {})):
        zero = {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": 4e6,
            "sub_group_size": 4e6,
            "offload_optimizer": {"device": "cpu", "pin_memory": True, **more},
        }
        config = {
            "train_batch_size": 4,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "wall_clock_breakdown": True,
        }
        (folder / f"{name}offload.json").write_text(json.dumps(config), encoding="utf-8")


def trainer_configs(folder: Path) -> None:
    """Makes `zero1.json`, `tp.json` and others of the template, as the program's shell script does.

    The script says 0 where nothing is divided, by which transformers divides.
    """
    template = (folder / "configs" / "ds_config_temp.json").read_text(encoding="utf-8")
    for name, stage, size in (("zero1", 1, 1), ("zero2", 2, 1), ("zero3", 3, 1), ("tp", 0, 2), ("zero1tp", 1, 2)):
        text = template.replace("${zero_stage}", str(stage)).replace("${autotp_size}", str(size))
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def plain_config(folder: Path) -> None:
    """Makes `ds_plain.json`, a config with nothing but its sizes."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    (folder / "ds_plain.json").write_text(json.dumps(config), encoding="utf-8")


def bert_tasks(folder: Path) -> None:
    """Makes `bert`, the vocabulary of a BERT, with `squad.json` and `glue`, questions and pairs of sentences."""
    draw = random.Random(0)
    (folder / "bert").mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "bert" / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    paragraphs = []
    for number in range(24):
        words = draw.choices(WORDS, k=10)
        answer = {"text": words[4], "answer_start": len(" ".join(words[:4])) + 1}
        question = {"id": str(number), "question": _text(draw, 3), "answers": [answer]}
        paragraphs.append({"context": " ".join(words), "qas": [question]})
    data = [{"title": "drawn", "paragraphs": paragraphs}]
    (folder / "squad.json").write_text(json.dumps({"version": "1.1", "data": data}), encoding="utf-8")
    (folder / "glue").mkdir()
    rows = ["index\tsentence1\tsentence2\tlabel"]
    for number in range(32):
        label = draw.choice(("entailment", "not_entailment"))
        rows.append(f"{number}\t{_text(draw, 5)}\t{_text(draw, 5)}\t{label}")
    for split in ("train", "dev"):
        (folder / "glue" / f"{split}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def wikitext(folder: Path) -> None:
    """Makes `wikitext`, which `datasets` takes for the data set of this name."""
    draw = random.Random(0)
    names = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: train.jsonl\n"
        f"  - split: validation\n    path: validation.jsonl\n"
        for name in ("wikitext-2-v1", "wikitext-2-raw-v1")
    )
    for split, count in (("train", 64), ("validation", 16)):
        _write(folder / "wikitext" / f"{split}.jsonl", [{"text": _text(draw, 20)} for _ in range(count)])
    (folder / "wikitext" / "README.md").write_text(f"---\nconfigs:\n{names}---\n", encoding="utf-8")


def characters(folder: Path) -> None:
    """Makes `data/tiny`, numbers of characters as nanoGPT reads them."""
    import numpy

    draw = numpy.random.default_rng(0)
    target = folder / "data" / "tiny"
    target.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 4000), ("val", 1000)):
        draw.integers(0, 60, count).astype(numpy.uint16).tofile(target / f"{split}.bin")


def text(folder: Path) -> None:
    """Makes `input.txt`, text in lines."""
    draw = random.Random(0)
    (folder / "input.txt").write_text("\n".join(_text(draw, 10) for _ in range(120)), encoding="utf-8")


def images(folder: Path) -> None:
    """Makes `images/train` and `images/validation`, small pictures in folders of their classes."""
    for split, count in (("train", 12), ("validation", 4)):
        for kind in ("cat", "dog"):
            _draw_images(folder / "images" / split / kind, count)


def _draw_images(folder: Path, count: int, prefix: str = "") -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(str(folder.name))
    for number in range(count):
        pixels = bytes(draw.choices(range(256), k=64 * 64 * 3))
        Image.frombytes("RGB", (64, 64), pixels).save(folder / f"{prefix}{number}.png")
