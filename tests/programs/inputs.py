"""Small data and models for programs of others, in place of downloads. Each function takes the folder of the program."""

from __future__ import annotations

import json
import random
import re
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

WORDS = [f"w{number}" for number in range(90)]
BLOCK = r"^( *)\.\. code(?:-block)?:: python\n((?:\1[ \t]+.*\n|[ \t]*\n)+)"
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


def answers(folder: Path) -> None:
    """Makes the files that DeepSpeed-Chat reads for the data set `local/jsonfile`."""
    draw = random.Random(0)
    for split, count in (("train", 60), ("eval", 20)):
        rows: list[dict[str, str]] = []
        for _ in range(count):
            prompt = f"Human: {_text(draw, 5)} Assistant:"
            rows.append({"prompt": prompt, "chosen": _text(draw, 6), "rejected": _text(draw, 6)})
        _write(folder / "data" / f"{split}.json", rows)


def decided(folder: Path) -> None:
    """Makes a `model` whose next token follows from the last one: no two logits are so close that 16 bits decide."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(7, 0) * 20)
    model.save_pretrained(folder / "model")


def critic(folder: Path) -> None:
    """Makes `critic`, a model of rewards as the second step of DeepSpeed-Chat saves it."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder / "model")
    config.vocab_size = 8 * -(-config.vocab_size // 8)
    torch.manual_seed(2)
    model = AutoModel.from_config(config)
    weights = {f"rwtransformer.{name}": weight for name, weight in model.state_dict().items()}
    weights["v_head.weight"] = torch.randn(1, config.hidden_size)
    (folder / "critic").mkdir()
    config.save_pretrained(folder / "critic")
    torch.save(weights, folder / "critic" / "pytorch_model.bin")


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


def bert(folder: Path) -> None:
    """Makes `bert`, a tiny BERT with a tokenizer of words."""
    from transformers import BertConfig, BertModel

    tokenizer = _pair_tokenizer()
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertModel(config).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")


def accelerate_examples(folder: Path) -> None:
    """Makes what accelerate's examples name: `bert-base-cased`, a causal model, and the data sets `glue` and `wikitext`."""
    bert(folder)
    shutil.copytree(folder / "bert", folder / "bert-base-cased")
    (folder / "bert").rename(folder / "bert-base-uncased")
    language_model(folder)
    shutil.copytree(folder / "model", folder / "HuggingFaceTB" / "SmolLM-360M")
    shutil.copytree(folder / "model", folder / "microsoft" / "phi-2")
    draw = random.Random(0)
    for split, count in (("train", 203), ("validation", 45), ("test", 9)):
        rows = [{"idx": number, **_pair(draw, number)} for number in range(count)]
        _write(folder / "nyu-mll" / "glue" / f"{split}.jsonl", rows)
        # An example reads 500 lines of it.
        lines = [{"text": _text(draw, 12 + number % 9)} for number in range(500 if split == "train" else count)]
        _write(folder / "Salesforce" / "wikitext" / f"{split}.jsonl", lines)
        _write(folder / "roneneldan" / "TinyStories" / f"{split}.jsonl", lines)
    for data, name in (("nyu-mll/glue", "mrpc"), ("Salesforce/wikitext", "wikitext-2-v1")):
        files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "validation", "test"))
        card = f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n"
        (folder / data / "README.md").write_text(card, encoding="utf-8")
    shutil.copytree(folder / "nyu-mll" / "glue", folder / "glue")


def zero_2_template(folder: Path) -> None:
    """Makes `zero2.json`, a config of DeepSpeed's as accelerate's examples have it."""
    rates = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    config = {
        "zero_optimization": {"stage": 2},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(rates, "auto")},
    }
    (folder / "zero2.json").write_text(json.dumps(config), encoding="utf-8")


def phrases(folder: Path) -> None:
    """Makes `t5-base` of `t5`, and sentences with one word to answer."""
    (folder / "t5").rename(folder / "t5-base")
    draw = random.Random(0)
    for split, count in (("train", 51), ("val", 9)):
        rows = [{"sentence": _text(draw, 8), "label": _text(draw, 1)} for _ in range(count)]
        data = folder / "temp" / "data" / "FinancialPhraseBank-v1.0"
        _write(data / f"financial_phrase_bank_{split}.jsonl", rows)


def tweets(folder: Path) -> None:
    """Makes complaints with a class, where the shim looks for a file of the hub, and the models of peft's ZeRO examples."""
    data = folder / "datasets" / "ought" / "raft@refs" / "convert" / "parquet" / "twitter_complaints"
    draw = random.Random(0)
    for split, count in (("train", 19), ("test", 5)):
        rows = [{"Tweet text": _text(draw, 9), "ID": number, "Label": 1 + number % 2} for number in range(count)]
        _write_classes(data / split / "0000.parquet", rows, "Label", ["Unlabeled", *WORDS[:2]])
    for name, made in (("bigscience/bloomz-7b1", "model"), ("facebook/bart-large", "t5")):
        if (folder / made).exists():
            shutil.copytree(folder / made, folder / name)


def _write_classes(path: Path, rows: list[dict[str, Any]], column: str, kinds: list[str]) -> None:
    """Writes rows of which a column has classes with names, which `datasets` keeps in the metadata of the file."""
    import pyarrow
    from pyarrow import parquet

    types = {str: "string", int: "int64"}
    features: dict[str, Any] = {}
    for name, value in rows[0].items():
        features[name] = {"dtype": types[type(value)], "_type": "Value"}
    features[column] = {"names": kinds, "_type": "ClassLabel"}
    table = pyarrow.Table.from_pylist(rows)
    metadata = json.dumps({"info": {"features": features}})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.replace_schema_metadata({"huggingface": metadata}), path)


def sentences(folder: Path) -> None:
    """Makes `sentences`, lines of text."""
    _split(folder, "sentences", lambda draw: {"text": _text(draw, 12)})


def prompts(folder: Path) -> None:
    """Makes `prompts`, text that waits for more."""
    _split(folder, "prompts", lambda draw: {"prompt": _text(draw, 5)})


def vqgan(folder: Path) -> None:
    """Makes `vq.json` and `critic.json`, configs of a tiny VQGAN."""
    generator = {
        "block_out_channels": [8, 8],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "num_vq_embeddings": 16,
    }
    critic = {"in_channels": 3, "cond_channels": 0, "hidden_channels": 16, "depth": 4}
    for name, config in (("vq", generator), ("critic", critic)):
        (folder / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")


def similar(folder: Path) -> None:
    """Makes `sentence-transformers/stsb`, pairs of sentences with how alike they are, and another name of `bert`."""
    shutil.copytree(folder / "bert", folder / "distilbert" / "distilbert-base-uncased")
    draw = random.Random(0)
    for split, count in (("train", 75), ("validation", 13), ("test", 13)):
        rows = [
            {"sentence1": _text(draw, 5), "sentence2": _text(draw, 5), "score": draw.random()} for _ in range(count)
        ]
        _write(folder / "sentence-transformers" / "stsb" / f"{split}.jsonl", rows)


def t5(folder: Path) -> None:
    """Makes `t5`, a tiny T5 with a tokenizer of words."""
    from transformers import T5Config, T5ForConditionalGeneration

    tokenizer = _tokenizer()
    torch.manual_seed(1)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    T5ForConditionalGeneration(config).save_pretrained(folder / "t5")
    tokenizer.save_pretrained(folder / "t5")


def vit(folder: Path) -> None:
    """Makes `vit`, a tiny ViT with its image processor."""
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    torch.manual_seed(1)
    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        encoder_stride=8,
    )
    ViTModel(config).save_pretrained(folder / "vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "vit")


def segformer(folder: Path) -> None:
    """Makes `segformer`, a tiny SegFormer with its image processor."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation, SegformerImageProcessor

    torch.manual_seed(1)
    config = SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        num_labels=4,
    )
    SegformerForSemanticSegmentation(config).save_pretrained(folder / "segformer")
    SegformerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder / "segformer")


def _pair_tokenizer() -> Any:
    """Returns a tokenizer of words that marks pairs as BERT's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "mask_token": "[MASK]",
    }
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)


def task_files(folder: Path) -> None:
    """Makes `train_TASK.json` and `test_TASK.json` for each task on text; the numbers of rows are odd."""
    makers = {
        "pairs": _pair,
        "words": _words,
        "choice": _choice,
        "question": _question,
        "summary": _summary,
        "translation": _translation,
    }
    for task, make in makers.items():
        draw = random.Random(0)
        for split, count in (("train", 27), ("test", 9)):
            rows = [make(draw, number) for number in range(count)]
            path = folder / f"{split}_{task}.json"
            if task == "question":  # the program reads these from a field of one document
                path.write_text(json.dumps({"data": rows}), encoding="utf-8")
            else:
                _write(path, rows)
    for split, count in (("train", 60), ("test", 12)):
        draw = random.Random(count)
        lines = [_text(draw, 12) for _ in range(count)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _pair(draw: random.Random, number: int) -> dict[str, Any]:
    return {"sentence1": _text(draw, 5), "sentence2": _text(draw, 7), "label": number % 2}


def _words(draw: random.Random, number: int) -> dict[str, Any]:
    words = draw.choices(WORDS, k=4 + number % 5)
    return {"tokens": words, "ner_tags": [draw.choice(("O", "B-A", "I-A")) for _ in words]}


def _choice(draw: random.Random, number: int) -> dict[str, Any]:
    endings = {f"ending{position}": _text(draw, 4) for position in range(4)}
    return {"sent1": _text(draw, 6), "sent2": _text(draw, 2), "label": number % 4, **endings}


def _question(draw: random.Random, number: int) -> dict[str, Any]:
    words = draw.choices(WORDS, k=10)
    answers = {"text": [words[4]], "answer_start": [len(" ".join(words[:4])) + 1]}
    return {"id": str(number), "context": " ".join(words), "question": _text(draw, 3), "answers": answers}


def _summary(draw: random.Random, number: int) -> dict[str, Any]:
    return {"text": _text(draw, 12), "summary": _text(draw, 3 + number % 3)}


def _translation(draw: random.Random, number: int) -> dict[str, Any]:
    return {"translation": {"en": _text(draw, 5 + number % 4), "de": _text(draw, 5)}}


def masks(folder: Path) -> None:
    """Makes `masks`, pictures with a class for each pixel."""
    for split, count in (("train", 12), ("validation", 5)):
        rows: list[dict[str, Any]] = [{"label_file_name": f"mask{number}.png"} for number in range(count)]
        _save_pictures(folder / "masks" / split, rows, ("L", 1))
    names = {str(number): f"class{number}" for number in range(4)}
    (folder / "masks" / "id2label.json").write_text(json.dumps(names), encoding="utf-8")


def _save_pictures(folder: Path, rows: Iterable[dict[str, Any]], mask: tuple[str, int] | None = None) -> None:
    """Writes pictures and masks with the table of them that `datasets` reads."""
    folder.mkdir(parents=True)
    table = []
    for number, row in enumerate(rows):
        _picture(number).save(folder / f"picture{number}.png")
        if mask is not None:
            _mask(number, mask).save(folder / f"mask{number}.png")
        table.append({"image_file_name": f"picture{number}.png", **row})
    _write(folder / "metadata.jsonl", table)


def _picture(number: int) -> Any:
    from PIL import Image

    draw = random.Random(number)
    return Image.frombytes("RGB", (64, 64), bytes(draw.choices(range(256), k=64 * 64 * 3)))


def _mask(number: int, kind: tuple[str, int]) -> Any:
    """Returns a picture whose upper half has one class, and whose lower half another."""
    from PIL import Image

    mode, channels = kind
    rows = []
    for row in range(64):
        # Of a thing's mask 0 is the background, which is no thing.
        value = (number + row // 32) % 4 if channels == 1 else 1 + (number + row // 32) % 2
        pixel = bytes([value] if channels == 1 else [value, 1 + row // 32, 0])
        rows.append(pixel * 64)
    return Image.frombytes(mode, (64, 64), b"".join(rows))


def tutorial(folder: Path) -> None:
    """Writes the Python of each tutorial: `NAME.py` has all blocks of `NAME.rst`, and `NAME_1.py`, ... one each."""
    for page in folder.glob("*.rst"):
        blocks = re.findall(BLOCK, page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        code = [textwrap.dedent(block) for _, block in blocks]
        page.with_suffix(".py").write_text("\n".join(code), encoding="utf-8")
        for number, block in enumerate(code, 1):
            page.with_name(f"{page.stem}_{number}.py").write_text(block, encoding="utf-8")


def image_folders(folder: Path) -> None:
    """Makes `images/train` and `images/val`, which torchvision's references read."""
    for split, count in (("train", 12), ("val", 4)):
        for kind in ("cat", "dog"):
            _draw_images(folder / "images" / split / kind, count)


def nanochat(folder: Path) -> None:
    """Makes `base`: documents in parquet, and a tokenizer of single bytes, as nanochat keeps them."""
    import pickle

    import pyarrow
    import tiktoken
    from pyarrow import parquet

    draw = random.Random(0)
    data = folder / "base" / "base_data_climbmix"
    data.mkdir(parents=True)
    for number in range(3):
        table = pyarrow.table({"text": [_text(draw, 20) for _ in range(400)]})
        parquet.write_table(table, data / f"shard_{number:05d}.parquet", row_group_size=50)
    names = ["bos", "user_start", "user_end", "assistant_start", "assistant_end"]
    names += ["python_start", "python_end", "output_start", "output_end"]
    special = {f"<|{name}|>": 256 + number for number, name in enumerate(names)}
    single = {bytes([number]): number for number in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=r"\S+|\s+", mergeable_ranks=single, special_tokens=special)
    (folder / "base" / "tokenizer").mkdir()
    (folder / "base" / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    lengths = torch.tensor([1] * 256 + [0] * len(names), dtype=torch.int32)
    torch.save(lengths, folder / "base" / "tokenizer" / "token_bytes.pt")
    for name in ("wandb", "rustbpe"):  # it imports both, and calls neither here
        (folder / f"{name}.py").write_text("", encoding="utf-8")


def preferences(folder: Path) -> None:
    """Makes `preferences`, a prompt with a better and a worse answer."""
    _split(folder, "preferences", _preference)


def _preference(draw: random.Random) -> dict[str, Any]:
    question = [{"role": "user", "content": _text(draw, 5)}]
    answers = [[{"role": "assistant", "content": _text(draw, 8)}] for _ in range(2)]
    return {"prompt": question, "chosen": answers[0], "rejected": answers[1]}


def triples(folder: Path) -> None:
    """Makes `triples`, a prompt with a best, a better and a worse answer."""
    _split(folder, "triples", lambda draw: {**_preference(draw), "reference": _chat(draw)[1:]})


def judgements(folder: Path) -> None:
    """Makes `judgements`, a prompt with an answer that is good or not."""
    _split(folder, "judgements", _judgement)


def _judgement(draw: random.Random) -> dict[str, Any]:
    question = [{"role": "user", "content": _text(draw, 5)}]
    answer = [{"role": "assistant", "content": _text(draw, 8)}]
    return {"prompt": question, "completion": answer, "label": draw.random() < 0.5}


def diffusion(folder: Path) -> None:
    """Makes `sd`, a tiny Stable Diffusion, and pictures: `captions`, `conditions`, `things`."""
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    pieces = _pieces()
    tokenizer = CLIPTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[])
    tokenizer.model_max_length = 16
    torch.manual_seed(1)
    text_config = CLIPTextConfig(
        vocab_size=len(pieces),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=len(pieces) - 2,
        eos_token_id=len(pieces) - 1,
        pad_token_id=len(pieces) - 1,
    )
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8, 16),  # a picture becomes an eighth, which ControlNet's condition becomes too
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=8,
    )
    pipeline = StableDiffusionPipeline(
        vae, CLIPTextModel(text_config), tokenizer, unet, DDPMScheduler(), None, None, requires_safety_checker=False
    )
    pipeline.save_pretrained(folder / "sd")
    rows = [{"text": _text(random.Random(number), 2)} for number in range(12)]
    _save_pictures(folder / "captions" / "train", rows)
    rows = [{**row, "conditioning_image_file_name": f"mask{number}.png"} for number, row in enumerate(rows)]
    _save_pictures(folder / "conditions" / "train", rows, ("RGB", 3))
    rows = [{"edited_image_file_name": f"mask{number}.png", "text": row["text"]} for number, row in enumerate(rows)]
    _save_pictures(folder / "edits" / "train", rows, ("RGB", 3))
    _draw_images(folder / "things", 6)


def _pieces() -> list[str]:
    """Returns the words of CLIP's tokenizer."""
    letters = [chr(number) for number in range(33, 127)]
    return [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]


def unconditional(folder: Path) -> None:
    """Makes `unet`, the config of a tiny model of pictures, and `things`, pictures."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=4,
    )
    model.save_config(folder / "unet")
    _draw_images(folder / "things", 11)


def questions(folder: Path) -> None:
    """Makes `questions`, prompts that wait for an answer, and `rewards.py`, which counts the letters of one."""
    _split(folder, "questions", lambda draw: {"prompt": [{"role": "user", "content": _text(draw, 5)}]})
    reward = (
        "def letters(completions, **_):\n    return [float(len(answer[0]['content']) % 7) for answer in completions]\n"
    )
    (folder / "rewards.py").write_text(reward, encoding="utf-8")


def robot(folder: Path) -> None:
    """Makes `robot`, three short episodes of states and actions in the files of LeRobot's format 3."""
    import pandas
    import pyarrow
    from pyarrow import parquet

    num_episodes, length = 3, 12
    widths = {"observation.state": 4, "observation.environment_state": 3, "action": 2}
    counters = ("frame_index", "episode_index", "index", "task_index")
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.rand(num_episodes * length, width, generator=generator) for name, width in widths.items()}
    features: dict[str, Any] = {
        name: {"dtype": "float32", "shape": [width], "names": None} for name, width in widths.items()
    }
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    features |= {name: {"dtype": "int64", "shape": [1], "names": None} for name in counters}
    info = {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": num_episodes,
        "total_frames": num_episodes * length,
        "total_tasks": 1,
        "chunks_size": 1000,
        "fps": 10,
        "splits": {"train": f"0:{num_episodes}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": None,
        "features": features,
    }
    statistics = {}
    for name, rows in values.items():
        numbers = {"min": rows.amin(0), "max": rows.amax(0), "mean": rows.mean(0), "std": rows.std(0)}
        statistics[name] = {key: number.tolist() for key, number in numbers.items()}
    meta = folder / "robot" / "meta"
    (meta / "episodes" / "chunk-000").mkdir(parents=True)
    (folder / "robot" / "data" / "chunk-000").mkdir(parents=True)
    (meta / "info.json").write_text(json.dumps(info), encoding="utf-8")
    (meta / "stats.json").write_text(json.dumps(statistics), encoding="utf-8")
    pandas.DataFrame({"task_index": [0]}, index=["reach"]).to_parquet(meta / "tasks.parquet")
    episodes = []
    frames = []
    for episode in range(num_episodes):
        first = episode * length
        episodes.append(
            {
                "episode_index": episode,
                "tasks": ["reach"],
                "length": length,
                "data/chunk_index": 0,
                "data/file_index": 0,
                "dataset_from_index": first,
                "dataset_to_index": first + length,
            }
        )
        for frame in range(length):
            row: dict[str, Any] = {name: rows[first + frame].tolist() for name, rows in values.items()}
            row["timestamp"] = frame / 10
            row |= {"frame_index": frame, "episode_index": episode, "index": first + frame, "task_index": 0}
            frames.append(row)
    parquet.write_table(pyarrow.Table.from_pylist(episodes), meta / "episodes" / "chunk-000" / "file-000.parquet")
    fields = [(name, pyarrow.list_(pyarrow.float32(), width)) for name, width in widths.items()]
    fields += [("timestamp", pyarrow.float32()), *((name, pyarrow.int64()) for name in counters)]
    table = pyarrow.Table.from_pylist(frames, schema=pyarrow.schema(fields))
    parquet.write_table(table, folder / "robot" / "data" / "chunk-000" / "file-000.parquet")


def llama3_2(folder: Path) -> None:
    """Makes `model`, a tiny Llama 3.2 with a tokenizer of single bytes, as torchtune reads them."""
    import base64

    from transformers import LlamaConfig, LlamaForCausalLM

    names = ["begin_of_text", "end_of_text", "finetune_right_pad_id", "step_id", "start_header_id", "end_header_id"]
    names += ["eom_id", "eot_id", "python_tag", "image"]
    special = [{"content": f"<|{name}|>", "id": 256 + number} for number, name in enumerate(names)]
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "model" / "special.json").write_text(json.dumps({"added_tokens": special}), encoding="utf-8")
    lines = [f"{base64.b64encode(bytes([number])).decode()} {number}" for number in range(256)]
    (folder / "model" / "tokenizer.model").write_text("\n".join(lines) + "\n", encoding="utf-8")


def boxes(folder: Path) -> None:
    """Makes `yolos`, a tiny model that finds things, and `boxes`, pictures with one box or two."""
    import datasets
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

    torch.manual_seed(1)
    config = YolosConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=[64, 64],
        num_detection_tokens=6,
        num_labels=2,
    )
    YolosForObjectDetection(config).save_pretrained(folder / "yolos")
    YolosImageProcessor().save_pretrained(folder / "yolos")
    things = {
        "id": datasets.List(datasets.Value("int64")),
        "area": datasets.List(datasets.Value("float32")),
        "bbox": datasets.List(datasets.List(datasets.Value("float32"), length=4)),
        "category": datasets.List(datasets.ClassLabel(names=["cat", "dog"])),
    }
    features = datasets.Features({"image_id": datasets.Value("int64"), "image": datasets.Image(), "objects": things})
    for split, count in (("train", 11), ("validation", 5), ("test", 3)):
        rows = []
        for number in range(count):
            corners = [(4 + 2 * number, 8, 20, 16), (10, 30 + number, 30, 20)][: 1 + number % 2]
            found = {
                "id": list(range(len(corners))),
                "area": [float(width * height) for _, _, width, height in corners],
                "bbox": [list(corner) for corner in corners],
                "category": [(number + position) % 2 for position in range(len(corners))],
            }
            rows.append({"image_id": number, "image": _picture(number), "objects": found})
        _save_parquet(folder / "boxes", split, rows, features)


def _save_parquet(folder: Path, split: str, rows: list[dict[str, Any]], features: Any) -> None:
    """Writes one split of a data set with the kinds of its columns, which `datasets` loads by its folder."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(exist_ok=True)
    encoded = [features.encode_example(row) for row in rows]
    table = pyarrow.Table.from_pylist(encoded, schema=features.arrow_schema)
    parquet.write_table(table, folder / f"{split}.parquet")


def instances(folder: Path) -> None:
    """Makes `mask2former`, a tiny model that finds things pixel by pixel, and `instances`, pictures with such masks."""
    import datasets
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessor,
        SwinConfig,
    )

    torch.manual_seed(1)
    backbone = SwinConfig(
        image_size=64,
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        dim_feedforward=32,
        num_attention_heads=2,
        num_queries=5,
        num_labels=3,
        train_num_points=64,
    )
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder / "mask2former")
    Mask2FormerImageProcessor(size={"height": 64, "width": 64}, ignore_index=255).save_pretrained(
        folder / "mask2former"
    )
    numbers = {name: datasets.Value("int64") for name in ("background", "cat", "dog")}
    kinds = {"image": datasets.Image(), "annotation": datasets.Image(), "semantic_class_to_id": numbers}
    names = {"background": 0, "cat": 1, "dog": 2}
    for split, count in (("train", 11), ("validation", 5)):
        rows = []
        for number in range(count):
            mask = _mask(number, ("RGB", 3))
            rows.append({"image": _picture(number), "annotation": mask, "semantic_class_to_id": names})
        _save_parquet(folder / "instances", split, rows, datasets.Features(kinds))


def choices(folder: Path) -> None:
    """Makes `choices`, questions with three answers, and `questions.py`, lighteval's task of them.

    The metric of the task writes the log-probabilities that each answer got into the record of this rank.
    """
    draw = random.Random(0)
    rows = []
    for number in range(11):
        rows.append(
            {"question": _text(draw, 4), "answers": [_text(draw, 1 + size) for size in range(3)], "right": number % 3}
        )
    _write(folder / "choices" / "validation.jsonl", rows)
    code = """
        import statistics

        import sitecustomize
        from lighteval.metrics.metrics_sample import SampleLevelComputation
        from lighteval.metrics.utils.metric_utils import SampleLevelMetric
        from lighteval.tasks.lighteval_task import LightevalTaskConfig
        from lighteval.tasks.requests import Doc, SamplingMethod


        class Recorded(SampleLevelComputation):
            def compute(self, doc, model_response, **_):
                for value in model_response.logprobs:
                    sitecustomize.write(float(value))
                return float(max(model_response.logprobs) == model_response.logprobs[doc.gold_index])


        def question(line, task_name):
            answers = [" " + answer for answer in line["answers"]]
            return Doc(task_name=task_name, query=line["question"], choices=answers, gold_index=line["right"])


        METRIC = SampleLevelMetric(
            metric_name="recorded",
            higher_is_better=True,
            category=SamplingMethod.LOGPROBS,
            sample_level_fn=Recorded(),
            corpus_level_fn=statistics.mean,
        )
        TASKS_TABLE = [
            LightevalTaskConfig(
                name="drawn",
                prompt_function=question,
                hf_repo="choices",
                hf_subset="default",
                metrics=[METRIC],
                hf_avail_splits=["validation"],
                evaluation_splits=["validation"],
            )
        ]
    """
    (folder / "questions.py").write_text(textwrap.dedent(code), encoding="utf-8")
    # lighteval imports all of its tasks, and one of them would download this file.
    (folder / "lighteval" / "tasks" / "tasks" / "tinyBenchmarks.pkl").write_bytes(b"")


def axolotl(folder: Path) -> None:
    """Makes `axolotl.yaml`, a training of the whole model on `chats`."""
    data = {"path": "chats/train.jsonl", "ds_type": "json", "type": "chat_template", "field_messages": "messages"}
    config = {
        "base_model": "model",
        "datasets": [data],
        "chat_template": "tokenizer_default",
        "dataset_prepared_path": "prepared",
        "val_set_size": 0,
        "sequence_len": 64,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 0.01,
        "optimizer": "adamw_torch",
        "lr_scheduler": "cosine",
        "logging_steps": 1,
        "bf16": False,
        "fp16": False,
        "seed": 1,
        "use_cpu": True,
        "output_dir": "out",
    }
    (folder / "axolotl.yaml").write_text(json.dumps(config), encoding="utf-8")


def latents(folder: Path) -> None:
    """Makes what fast-DiT reads: `features`, latents of pictures with their classes, and the VAE that it names."""
    import numpy

    draw = numpy.random.default_rng(0)
    for number in range(20):
        for name, value in (
            ("features", draw.standard_normal((1, 4, 32, 32), dtype=numpy.float32)),
            ("labels", numpy.array([number % 10])),
        ):
            path = folder / "features" / f"imagenet256_{name}" / f"{number}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            numpy.save(path, value)
    shutil.copytree(folder / "sd" / "vae", folder / "stabilityai" / "sd-vae-ft-ema")


def denoising(folder: Path) -> None:
    """Makes `train.py`, which calls the trainer of denoising-diffusion-pytorch, and `things`, its pictures."""
    _draw_images(folder / "things", 104)
    script = """
import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

torch.manual_seed(1)
unet = Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
trainer = Trainer(
    GaussianDiffusion(unet, image_size=16, timesteps=20, sampling_timesteps=2), "things", train_batch_size=16, train_lr=1e-2,
    train_num_steps=6, gradient_accumulate_every=2, ema_update_every=2, save_and_sample_every=3, num_samples=4,
    calculate_fid=False, augment_horizontal_flip=False, results_folder="out",
)
trainer.train()
"""
    (folder / "train.py").write_text(script, encoding="utf-8")


def products(folder: Path) -> None:
    """Makes `products`, searches with the titles of products, and whether they belong together."""
    draw = random.Random(0)
    for split, count in (("train", 46), ("validation", 18)):
        rows = [
            {"query": _text(draw, 3), "product_title": _text(draw, 6), "relevance_label": number % 2}
            for number in range(count)
        ]
        _write(folder / "products" / f"{split}.jsonl", rows)


def openings(folder: Path) -> None:
    """Makes `openings`, beginnings of texts; a program keeps 100 of them for its evaluation."""
    draw = random.Random(0)
    _write(folder / "openings" / "train.jsonl", [{"prompt": _text(draw, 5)} for _ in range(116)])


def clip(folder: Path) -> None:
    """Makes `clip`, the config of a tiny model that open_clip makes."""
    model = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    }
    (folder / "clip").mkdir()
    (folder / "clip" / "open_clip_config.json").write_text(json.dumps({"model_cfg": model}), encoding="utf-8")


def kohya(folder: Path) -> None:
    """Makes `sd15`, a tiny Stable Diffusion with the blocks of 1.5, and `pictures` with captions, as sd-scripts reads them."""
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    pipeline = StableDiffusionPipeline.from_pretrained(folder / "sd", safety_checker=None)
    torch.manual_seed(1)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 32, 64, 64), cross_attention_dim=16, attention_head_dim=8
    )
    pipeline.register_modules(unet=unet)
    pipeline.save_pretrained(folder / "sd15")
    cached = folder / "cached" / "openai_clip-vit-large-patch14"
    cached.mkdir(parents=True)
    vocabulary = {piece: number for number, piece in enumerate(_pieces())}
    for name, text in (
        ("vocab.json", json.dumps(vocabulary)),
        ("merges.txt", "#version: 0.2\n"),
        ("tokenizer_config.json", json.dumps({"model_max_length": 16})),
    ):
        (cached / name).write_text(text, encoding="utf-8")
    pictures = folder / "pictures" / "2_things"
    _draw_images(pictures, 6)
    for number in range(6):
        (pictures / f"{number}.txt").write_text(_text(random.Random(number), 2), encoding="utf-8")


def pipelined(folder: Path) -> None:
    """Makes `bert-base-uncased` and `gpt2`, tiny models with as many positions as these have."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(1)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    BertForMaskedLM(BertConfig(vocab_size=64, **small)).save_pretrained(folder / "bert-base-uncased")
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, pad_token_id=0, bos_token_id=1, eos_token_id=1)
    GPT2ForSequenceClassification(config).save_pretrained(folder / "gpt2")
