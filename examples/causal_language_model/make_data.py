"""Makes the data for the scripts of this folder: text from Python's standard library, and a small GPT-2 with its tokenizer.

python examples/causal_language_model/make_data.py      writes runs/clm: train.json, validation.json, gpt2/

Nothing is downloaded: the text is the source of the running Python, and the model has random weights.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

TRAIN = [
    "argparse",
    "ast",
    "csv",
    "difflib",
    "inspect",
    "os",
    "random",
    "shutil",
    "statistics",
    "string",
    "subprocess",
    "tempfile",
    "threading",
    "tokenize",
]
VALIDATION = "calendar heapq queue textwrap".split()  # noqa: SIM905


def functions(modules: list[str]) -> list[str]:
    """The source of some modules, in pieces that begin at a definition."""
    library = Path(sysconfig.get_path("stdlib"))
    pieces = []
    for module in modules:
        text = (library / f"{module}.py").read_text(encoding="utf-8")
        pieces += [f"def {piece}" for piece in text.split("\ndef ")[1:]]
    return pieces


def write_lines(file: Path, texts: list[str]) -> None:
    """Writes one JSON object in each line, as `--train_file` of the scripts expects it."""
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def main(folder: Path, vocabulary: int) -> None:
    """Writes all files."""
    folder.mkdir(parents=True, exist_ok=True)
    train = functions(TRAIN)
    write_lines(folder / "train.json", train)
    write_lines(folder / "validation.json", functions(VALIDATION))

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(train, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder / "gpt2")

    torch.manual_seed(0)
    sizes = {"n_positions": 128, "n_embd": 128, "n_layer": 2, "n_head": 4}
    GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(
        folder / "gpt2"
    )
    print(f"{len(train)} texts to learn from, and a GPT-2 with {vocabulary} tokens: {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/clm"), help="default: %(default)s")
    parser.add_argument("--vocab-size", type=int, default=1024)
    given = parser.parse_args()
    main(given.out, given.vocab_size)
