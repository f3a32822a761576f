"""Reads a file of texts as rows of equal length."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase


def read_blocks(file: str, tokenizer: PreTrainedTokenizerBase, length: int) -> list[dict[str, list[int]]]:
    """All texts of a file of JSON lines, joined and split into rows of `length` tokens; an incomplete last row is dropped."""
    tokens: list[int] = []
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        tokens += tokenizer(json.loads(line)["text"])["input_ids"]
        tokens.append(tokenizer.eos_token_id)
    rows = []
    for start in range(0, len(tokens) - length + 1, length):
        block = tokens[start : start + length]
        rows.append({"input_ids": block, "labels": block})
    return rows
