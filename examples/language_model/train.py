"""Trains a small GPT-2 from scratch on the source of Python's standard library.

python examples/language_model/train.py                                  one process
paceline launch --procs 2 examples/language_model/train.py               two processes, with the same losses
paceline launch --procs 2 examples/language_model/train.py --resume      continues an interrupted run
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from corpus import HELD_OUT, TRAIN, blocks, load_tokenizer
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from paceline import Accelerator, set_seed

IGNORED = -100  # the label of padding


def build_model(args: argparse.Namespace) -> nn.Module:
    """A GPT-2 with random weights. It has no dropout, so the results do not depend on the number of processes."""
    config = GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=args.block,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.width // 32,
        initializer_range=0.06,  # the usual 0.02 is for wider models; with it, this model learns half as fast
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def collate(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pads sequences to the same length. Shape: input_ids and labels [n, longest]."""
    return {
        "input_ids": pad_sequence(parts, batch_first=True),
        "labels": pad_sequence(parts, batch_first=True, padding_value=IGNORED),
    }


def losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the token losses of each sequence, and the number of its tokens. Shape: both [n]."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    target = batch["labels"][:, 1:]  # each token is predicted from those before it
    each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none", ignore_index=IGNORED)
    return each.view_as(target).sum(dim=1), (target != IGNORED).sum(dim=1)


@torch.no_grad()
def evaluate(acc: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Mean loss over all tokens of a loader."""
    model.eval()
    parts = [acc.gather_for_metrics(losses(model, batch)) for batch in loader]
    sums, tokens = (torch.cat(column) for column in zip(*parts, strict=True))
    return (sums.sum() / tokens.sum()).item()


@torch.no_grad()
def write(model: nn.Module, tokenizer, prompt: str, length: int) -> str:
    """The most likely continuation of a prompt."""
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=next(model.parameters()).device)
    for _ in range(length):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return tokenizer.decode(ids[0].tolist())


def schedule(warmup: int, steps: int):
    """The factor of the learning rate at an optimizer step: a linear warm-up, then a cosine down to a tenth."""

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return share


def main(args: argparse.Namespace) -> None:
    """Trains, and evaluates on the held-out modules."""
    set_seed(args.seed)
    # The batch size is that of all processes together, so the results do not depend on the number of processes.
    acc = Accelerator(
        args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
        split_batches=True,
        data_seed=args.seed,
        log_with="jsonl",
        project_dir=args.out.parent,
    )
    with acc.main_process_first():  # one process trains the tokenizer, the others read it
        tokenizer = load_tokenizer(args.out.parent / f"bpe_{args.vocab_size}.json", args.vocab_size)
    learn = blocks(tokenizer, TRAIN[: args.modules], args.block)
    held_out = blocks(tokenizer, HELD_OUT[: args.modules], args.block)

    loader, held_out_loader = acc.prepare(
        DataLoader(learn, args.batch_size, shuffle=True, collate_fn=collate),
        DataLoader(held_out, 4 * args.batch_size, collate_fn=collate),
    )
    steps = args.epochs * math.ceil(len(loader) / args.accumulate)
    model = build_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(args.warmup, steps))
    model, optimizer, scheduler = acc.prepare(model, optimizer, scheduler)
    acc.init_trackers(args.out.name, vars(args))
    acc.print(
        f"{sum(map(len, learn)):,} tokens to learn from, {sum(map(len, held_out)):,} held out; "
        f"{sum(p.numel() for p in model.parameters()):,} parameters; {acc.mixed_precision} mixed precision; "
        f"{acc.num_processes} process{'es' * (acc.num_processes > 1)} on {acc.device.type}"
    )
    if args.resume:
        acc.load_state(args.out / "checkpoint")
        acc.print(f"resumed after step {scheduler.last_epoch}, in epoch {loader.position.epoch + 1}")

    for epoch in range(loader.position.epoch, args.epochs):
        model.train()
        began, seen, window = time.perf_counter(), 0, torch.zeros(2, device=acc.device)
        for batch in loader:
            lr = optimizer.param_groups[0]["lr"]
            with acc.accumulate(model):
                sums, tokens = losses(model, batch)
                acc.backward(sums.sum(), num_items=tokens.sum())  # each token has the same weight in every batch
                norm = acc.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            sums, tokens = acc.gather_for_metrics((sums.detach(), tokens))
            window += torch.stack([sums.sum(), tokens.sum()])
            if not acc.sync_gradients:
                continue
            total, count = window.tolist()
            window.zero_()
            seen += count
            step = scheduler.last_epoch  # all optimizer steps so far, also those before a resume
            rate = seen / (time.perf_counter() - began)
            values = {"loss": total / count, "lr": lr, "norm": norm, "tokens_per_s": rate}
            acc.log(values, step)
            if step % args.log_every == 0:
                acc.print(f"step {step:4}/{steps}  loss {total / count:6.3f}  {rate:8,.0f} tokens/s", flush=True)
            if step % args.save_every == 0 or step == args.stop_after:
                acc.save_state(args.out / "checkpoint")
            if step == args.stop_after:
                acc.print(f"stopped after step {step}; `--resume` goes on")
                return acc.end_training()
        loss = evaluate(acc, model, held_out_loader)
        acc.log({"held_out_loss": loss, "perplexity": math.exp(loss)}, scheduler.last_epoch)
        acc.print(f"epoch {epoch + 1}/{args.epochs}: held-out loss {loss:.3f}, perplexity {math.exp(loss):.1f}")

    acc.save_model(model, args.out / "model")
    if acc.is_main_process:
        print(f"it writes: {write(acc.unwrap_model(model), tokenizer, args.prompt, 40)!r}")
    return acc.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/language_model"), help="results (default: %(default)s)")
    parser.add_argument("--mixed-precision", choices=["no", "bf16", "fp16"], help="default: as launched")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4, help="runs a micro-batch, of all processes together")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--warmup", type=int, default=10, help="steps until it is reached")
    parser.add_argument("--block", type=int, default=128, help="tokens a run")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--modules", type=int, help="use only the first modules of the library (default: all)")
    parser.add_argument("--prompt", default="def __init__(self", help="what it continues at the end")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two printed lines")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--stop-after", type=int, help="stop after that step, as an interruption would")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
