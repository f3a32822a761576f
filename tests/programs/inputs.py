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


def classifier(folder: Path) -> None:
    """Makes `classifier`, a tiny model that classifies texts."""
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = _tokenizer()
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder / "classifier")
    tokenizer.save_pretrained(folder / "classifier")


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


def preferences(folder: Path) -> None:
    """Makes `preferences`, pairs of a better and a worse answer to a question."""

    def row(draw: random.Random) -> dict[str, Any]:
        question, answer = _chat(draw)
        return {"prompt": [question], "chosen": [answer], "rejected": [_chat(draw)[1]]}

    _split(folder, "preferences", row)


def judged(folder: Path) -> None:
    """Makes `judged`, answers that are good or bad."""

    def row(draw: random.Random) -> dict[str, Any]:
        question, answer = _chat(draw)
        return {"prompt": [question], "completion": [answer], "label": draw.random() < 0.5}

    _split(folder, "judged", row)


def steps(folder: Path) -> None:
    """Makes `steps`, answers in steps that are right or wrong."""

    def row(draw: random.Random) -> dict[str, Any]:
        return {
            "prompt": _text(draw, 5),
            "completions": [_text(draw, 4) for _ in range(3)],
            "labels": [draw.random() < 0.5 for _ in range(3)],
        }

    _split(folder, "steps", row)


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


def pictures(folder: Path) -> None:
    """Makes `pictures`, small pictures in one folder, with captions."""
    _draw_images(folder / "pictures", 8)
    names = sorted(path.name for path in (folder / "pictures").glob("*.png"))
    draw = random.Random(0)
    rows = [{"file_name": name, "text": _text(draw, 4)} for name in names]
    _write(folder / "pictures" / "metadata.jsonl", rows)


def conditioned(folder: Path) -> None:
    """Makes `conditioned`, pictures with another picture that says how they look, and a caption."""
    _draw_images(folder / "conditioned", 8, prefix="image")
    _draw_images(folder / "conditioned", 8, prefix="control")
    draw = random.Random(0)
    rows = []
    for number in range(8):
        names = {"image_file_name": f"image{number}.png", "conditioning_image_file_name": f"control{number}.png"}
        rows.append({**names, "text": _text(draw, 4)})
    _write(folder / "conditioned" / "metadata.jsonl", rows)


def _draw_images(folder: Path, count: int, prefix: str = "") -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(str(folder.name))
    for number in range(count):
        pixels = bytes(draw.choices(range(256), k=64 * 64 * 3))
        Image.frombytes("RGB", (64, 64), pixels).save(folder / f"{prefix}{number}.png")


def diffusion_model(folder: Path) -> None:
    """Makes `diffusion`, a tiny Stable Diffusion."""
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    vocabulary: dict[str, int] = {}
    for letter in [*map(chr, range(97, 123)), *map(str, range(10))]:
        for token in (letter, f"{letter}</w>"):
            vocabulary[token] = len(vocabulary)
    for token in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[token] = len(vocabulary)
    files = folder / "clip"
    files.mkdir(parents=True)
    (files / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (files / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    tokenizer = CLIPTokenizer(str(files / "vocab.json"), str(files / "merges.txt"), model_max_length=77)
    torch.manual_seed(1)
    text = CLIPTextConfig(
        vocab_size=len(vocabulary) + 10,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    text.bos_token_id, text.eos_token_id = vocabulary["<|startoftext|>"], vocabulary["<|endoftext|>"]
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
    )
    vae = AutoencoderKL(
        block_out_channels=[32, 64],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
    )
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
    )
    pipeline.save_pretrained(folder / "diffusion")
