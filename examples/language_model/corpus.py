"""The source of Python's standard library as tokens of a byte-level BPE, which is trained on it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TRAIN = """
argparse ast cmd collections/__init__ configparser contextlib csv dataclasses difflib fractions functools html/parser
http/client inspect json/decoder json/encoder logging/__init__ optparse os pprint random shutil statistics string
subprocess tempfile threading tokenize traceback urllib/parse weakref
""".split()  # noqa: SIM905
HELD_OUT = "calendar fileinput heapq queue textwrap unittest/suite".split()  # noqa: SIM905


def read(modules: list[str]) -> list[str]:
    """The source of some modules of the running Python."""
    library = Path(sysconfig.get_path("stdlib"))
    return [(library / f"{module}.py").read_text(encoding="utf-8") for module in modules]


def load_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer in this file. If the file does not exist, the tokenizer is trained and written first."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(read(TRAIN), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def blocks(tokenizer: Tokenizer, modules: list[str], length: int) -> list[torch.Tensor]:
    """The modules as sequences of `length` tokens; the last sequence of each module may be shorter."""
    encoded = tokenizer.encode_batch(read(modules))
    return [part for module in encoded for part in torch.tensor(module.ids).split(length) if len(part) > 1]
