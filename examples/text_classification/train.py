"""Classifies sentences by emotion: a small BERT with a vocabulary of characters, trained from scratch.

python examples/text_classification/make_data.py
python examples/text_classification/train.py                             one process
paceline launch --procs 2 examples/text_classification/train.py          two, with the same numbers
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from sklearn.metrics import classification_report
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

from paceline import Accelerator, set_seed

LABELS = ["其他", "喜好", "悲伤", "厌恶", "愤怒", "高兴"]  # the position is the label id


def load_data(path: Path) -> list[tuple[str, int]]:
    """Reads [text, label id] pairs. If the file has another form, a ValueError says what is wrong, and where."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; make_data.py writes an example of such a file") from None
    except ValueError as error:  # neither UTF-8 nor JSON
        raise ValueError(f"{path} is not JSON in UTF-8: {error}") from None
    if not isinstance(data, list):
        raise ValueError(f"{path} holds a {type(data).__name__}; it should be a list of [text, label id] pairs")
    wrong = [(number, why) for number, pair in enumerate(data) if (why := what_is_wrong(pair))]
    if wrong:
        lines = "\n".join(f"  entry {number}: {why}" for number, why in wrong[:5])
        more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f'{path}: {len(wrong)} of {len(data)} entries are not like ["今天真好", 5]:\n{lines}{more}')
    if len(data) < 20:
        raise ValueError(
            f"{path} has {len(data)} sentences; at least 20 are needed to train on some and test on others"
        )
    return [(text, label) for text, label in data]


def what_is_wrong(pair: object) -> str:
    """Why this is not a [text, label id] pair; an empty text if it is one."""
    if not (isinstance(pair, list) and len(pair) == 2):
        return f"{json.dumps(pair, ensure_ascii=False)[:60]} is not a pair of a text and a label id"
    text, label = pair
    if not (isinstance(text, str) and text.strip()):
        return f"the text is {json.dumps(text, ensure_ascii=False)[:60]}"
    if type(label) is not int or not 0 <= label < len(LABELS):
        return f"the label id is {json.dumps(label, ensure_ascii=False)[:60]}; it should be 0 to {len(LABELS) - 1}"
    return ""


def write_vocabulary(path: Path, texts: list[str]) -> None:
    """Writes a file with one token in each line: BERT's special tokens, then every character of the texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    characters = sorted({character for text in texts for character in text.lower() if not character.isspace()})
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters]) + "\n", encoding="utf-8")


class Collate:
    """Makes a batch of sentences: character ids, padded to one length, and labels."""

    def __init__(self, tokenizer: BertTokenizer, max_seq_len: int) -> None:
        self.tokenizer, self.max_seq_len = tokenizer, max_seq_len

    def __call__(self, pairs: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
        texts = [" ".join(text) for text, _ in pairs]  # spaces between the characters, so that each of them is a token
        batch = self.tokenizer(
            texts, max_length=self.max_seq_len, padding="max_length", truncation=True, return_tensors="pt"
        )
        return {**batch, "label": torch.tensor([label for _, label in pairs])}


class Trainer:
    """Trains a classifier, keeps the weights that do best on the dev set, and tests them."""

    def __init__(self, args, model, criterion, optimizer, accelerator: Accelerator) -> None:
        self.args, self.model, self.criterion = args, model, criterion
        self.optimizer, self.accelerator = optimizer, accelerator

    def on_step(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and labels. The prepared loader has moved the batch to the device already."""
        label = batch.pop("label")
        return self.model(**batch).logits, label

    def train(self, train_loader, dev_loader) -> None:
        """Trains all epochs, and evaluates on the dev set every `eval_step` steps and at the end."""
        accelerator, start = self.accelerator, time.perf_counter()
        step, best_accuracy, total_step = 0, 0.0, self.args.epochs * len(train_loader)
        for epoch in range(1, self.args.epochs + 1):
            for batch in train_loader:
                self.model.train()
                logits, label = self.on_step(batch)
                loss = self.criterion(logits, label)
                accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                step += 1
                if step % self.args.log_step == 0 or step == 1:
                    logits, label = accelerator.gather_for_metrics((logits.detach(), label))  # from all processes
                    loss = self.criterion(logits, label)
                    accelerator.print(
                        f"【train】 epoch: {epoch}/{self.args.epochs} step: {step}/{total_step} loss: {loss:.6f}"
                    )
                if step % self.args.eval_step == 0 or step == total_step:
                    loss, accuracy = self.dev(dev_loader)
                    accelerator.print(f"【dev】 loss: {loss:.6f} accuracy: {accuracy:.4f}")
                    if accuracy > best_accuracy:
                        best_accuracy = accuracy
                        accelerator.print(f"【best accuracy】 {best_accuracy:.4f}")
                        accelerator.save(accelerator.get_state_dict(self.model), self.args.out / "best.pt")
        accelerator.print(f"耗时: {(time.perf_counter() - start) / 60:.2f}分钟")

    @torch.no_grad()
    def predict(self, loader) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and labels of all sentences of a loader, each once and in order, on every process."""
        self.model.eval()
        parts = [self.accelerator.gather_for_metrics(self.on_step(batch)) for batch in loader]
        logits, labels = zip(*parts, strict=True)
        return torch.cat(logits), torch.cat(labels)

    def dev(self, loader) -> tuple[float, float]:
        """Loss and accuracy."""
        logits, labels = self.predict(loader)
        return self.criterion(logits, labels).item(), (logits.argmax(dim=1) == labels).float().mean().item()

    def test(self, loader) -> str:
        """Loads the best weights, and prints precision and recall of each class."""
        self.accelerator.wait_for_everyone()  # until the main process has written the files
        best = torch.load(self.args.out / "best.pt", map_location=self.accelerator.device, weights_only=True)
        self.accelerator.unwrap_model(self.model).load_state_dict(best)
        logits, labels = self.predict(loader)
        return classification_report(
            labels.cpu(), logits.argmax(dim=1).cpu(), labels=range(len(LABELS)), target_names=LABELS, zero_division=0
        )


def build_model(args: argparse.Namespace, vocab_size: int) -> nn.Module:
    """A BERT with random weights. It has no dropout, so the results do not depend on the number of processes."""
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=args.max_seq_len,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=len(LABELS),
    )
    return BertForSequenceClassification(config)


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW without weight decay for biases and layer norms."""
    no_decay = ("bias", "LayerNorm.weight")
    groups: dict[float, list[nn.Parameter]] = {args.weight_decay: [], 0.0: []}
    for name, parameter in model.named_parameters():
        groups[0.0 if name.endswith(no_decay) else args.weight_decay].append(parameter)
    return torch.optim.AdamW(
        [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()], lr=args.learning_rate
    )


def main(args: argparse.Namespace) -> None:
    """Reads, trains, tests."""
    set_seed(args.seed)
    # The batch size is that of all processes together, so the results do not depend on the number of processes.
    accelerator = Accelerator(split_batches=True, data_seed=args.seed)
    try:
        data = load_data(args.data)
    except ValueError as error:
        accelerator.print(f"train.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    random.Random(args.seed).shuffle(data)
    held_out = max(1, len(data) // 10)
    test_data, dev_data, train_data = data[:held_out], data[held_out : 2 * held_out], data[2 * held_out :]
    vocabulary = args.out / "vocab.txt"
    if accelerator.is_main_process:
        write_vocabulary(vocabulary, [text for text, _ in train_data])
    accelerator.wait_for_everyone()
    tokenizer = BertTokenizer(str(vocabulary))
    collate = Collate(tokenizer, args.max_seq_len)

    def loader(part: list[tuple[str, int]], shuffle: bool = False) -> DataLoader:
        return DataLoader(part, args.batch_size, shuffle=shuffle, num_workers=args.workers, collate_fn=collate)

    model = build_model(args, len(tokenizer))
    optimizer = build_optimizer(model, args)
    model, optimizer, train_loader, dev_loader, test_loader = accelerator.prepare(
        model, optimizer, loader(train_data, shuffle=True), loader(dev_data), loader(test_data)
    )
    accelerator.print(
        f"{len(train_data)} sentences to learn from, {len(dev_data)} to choose by, {len(test_data)} to test on; "
        f"{len(tokenizer)} tokens, {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{accelerator.num_processes} process{'es' * (accelerator.num_processes > 1)} on {accelerator.device.type}"
    )
    trainer = Trainer(args, model, nn.CrossEntropyLoss(), optimizer, accelerator)
    trainer.train(train_loader, dev_loader)
    report = trainer.test(test_loader)
    accelerator.print(f"\n{report}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("runs/text_classification/data/train.json"))
    parser.add_argument("--out", type=Path, default=Path("runs/text_classification"), help="vocabulary and weights")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="sentences a step, of all processes together")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--max-seq-len", type=int, default=48)
    parser.add_argument("--log-step", type=int, default=20, help="steps between two lines about training")
    parser.add_argument("--eval-step", type=int, default=100, help="steps between two looks at the dev set")
    parser.add_argument("--workers", type=int, default=2, help="processes that read ahead, for each loader")
    parser.add_argument("--seed", type=int, default=123)
    main(parser.parse_args())
