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


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>", "user", "assistant", "system"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
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
