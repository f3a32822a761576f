"""Classifies sentences by emotion; written for DeepSpeed, and run by Paceline without deepspeed.

python examples/text_classification/make_data.py
paceline deepspeed --num_gpus 2 examples/emotion_deepspeed/train.py --deepspeed \
    --deepspeed_config examples/emotion_deepspeed/ds_config.json

Nothing here is specific to Paceline: the same file runs under `deepspeed` itself.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import deepspeed
import torch
from sklearn.metrics import classification_report
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

LABELS = ["其他", "喜好", "悲伤", "厌恶", "愤怒", "高兴"]  # the position is the label id


def read(args: argparse.Namespace) -> tuple[list, list, list]:
    """The training, dev and test sets: lists of [text, label id] pairs."""
    pairs = json.loads(args.data.read_text(encoding="utf-8"))
    random.Random(args.seed).shuffle(pairs)
    held_out = len(pairs) // 10
    return pairs[2 * held_out :], pairs[held_out : 2 * held_out], pairs[:held_out]


class Collate:
    """Makes a batch of sentences: character ids, padded to one length, and labels."""

    def __init__(self, texts: list[str], file: Path, length: int) -> None:
        characters = sorted({character for text in texts for character in text.lower() if not character.isspace()})
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters]) + "\n", encoding="utf-8")
        self.tokenizer, self.length = BertTokenizer(str(file)), length

    def __call__(self, pairs: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
        texts = [" ".join(text) for text, _ in pairs]  # spaces between the characters, so that each of them is a token
        batch = self.tokenizer(
            texts, max_length=self.length, padding="max_length", truncation=True, return_tensors="pt"
        )
        return {**batch, "labels": torch.tensor([label for _, label in pairs])}


def build_model(args: argparse.Namespace, vocab_size: int) -> nn.Module:
    """A BERT with random weights. It has no dropout, so the results do not depend on the number of processes."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=vocab_size,
            hidden_size=args.hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=4 * args.hidden_size,
            max_position_embeddings=args.length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=len(LABELS),
        )
    )


@torch.no_grad()
def guesses(engine, pairs: list, collate: Collate) -> torch.Tensor:
    """The predicted label of each sentence, in order, on every rank. Each rank computes a part of the sentences."""
    rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    engine.eval()
    found = torch.zeros(len(pairs), dtype=torch.long, device=engine.device)
    for begin in range(64 * rank, len(pairs), 64 * size):
        batch = {name: value.to(engine.device) for name, value in collate(pairs[begin : begin + 64]).items()}
        found[begin : begin + 64] = engine(**batch).logits.argmax(dim=1)
    deepspeed.comm.all_reduce(found)
    engine.train()
    return found


def main(args: argparse.Namespace) -> None:
    """Reads, trains, tests."""
    torch.manual_seed(args.seed)
    deepspeed.init_distributed()
    first = deepspeed.comm.get_rank() == 0
    train_data, dev_data, test_data = read(args)
    collate = Collate(
        [text for text, _ in train_data], args.out / f"vocab_{deepspeed.comm.get_rank()}.txt", args.length
    )
    model = build_model(args, len(collate.tokenizer))
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    sampler = DistributedSampler(train_data, seed=args.seed)
    micro = engine.train_micro_batch_size_per_gpu()
    loader = DataLoader(train_data, micro, sampler=sampler, collate_fn=collate, drop_last=True)
    best, truth = 0.0, torch.tensor([label for _, label in dev_data])
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss
            engine.backward(loss)
            boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            if boundary and engine.global_steps % args.log_step == 0:
                mean = loss.detach().float() / deepspeed.comm.get_world_size()
                deepspeed.comm.all_reduce(mean)
                if first:
                    print(f"epoch {epoch} step {engine.global_steps} loss {mean:.4f} lr {engine.get_lr()[0]:.6f}")
        accuracy = (guesses(engine, dev_data, collate).cpu() == truth).float().mean().item()
        if first:
            print(f"epoch {epoch}: {accuracy:.4f} of the dev set right")
        if accuracy > best:
            best = accuracy
            engine.save_checkpoint(str(args.out / "checkpoints"), tag="best", client_state={"accuracy": accuracy})
    _, state = engine.load_checkpoint(str(args.out / "checkpoints"), tag="best")
    found = guesses(engine, test_data, collate).cpu()
    if first:
        print(f"the best on the dev set: {state['accuracy']:.4f}; on the test set:")
        names = dict(labels=range(len(LABELS)), target_names=LABELS, zero_division=0)
        print(classification_report([label for _, label in test_data], found, **names))
    deepspeed.comm.log_summary()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("runs/text_classification/data/train.json"))
    parser.add_argument("--out", type=Path, default=Path("runs/emotion_deepspeed"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--length", type=int, default=48, help="characters of a sentence that are read")
    parser.add_argument("--log-step", type=int, default=20, help="steps between two lines about training")
    parser.add_argument("--seed", type=int, default=123)
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    deepspeed.add_config_arguments(parser)
    main(parser.parse_args())
