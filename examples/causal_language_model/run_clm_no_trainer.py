"""The same as `run_clm.py` with its own loop, written for accelerate, with checkpoints, a tracker and a resume.

paceline launch --compat accelerate --num_processes 2 examples/causal_language_model/run_clm_no_trainer.py \
    --model_name_or_path runs/clm/gpt2 --train_file runs/clm/train.json --validation_file runs/clm/validation.json \
    --output_dir runs/clm/trained
"""

from __future__ import annotations

import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from texts import read_blocks
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """The mean loss over all rows."""
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(batch["input_ids"].shape[0])))
    return torch.cat(losses).mean().item()


def main(args: argparse.Namespace) -> None:
    """Trains, saves after each epoch, and can continue from such a checkpoint."""
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with="tensorboard",
        project_dir=args.output_dir,
    )
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    train_rows = read_blocks(args.train_file, tokenizer, args.block_size)
    eval_rows = read_blocks(args.validation_file, tokenizer, args.block_size)
    size = args.per_device_train_batch_size
    train_loader = DataLoader(train_rows, shuffle=True, collate_fn=default_data_collator, batch_size=size)
    eval_loader = DataLoader(eval_rows, collate_fn=default_data_collator, batch_size=size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    steps_an_epoch = math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    steps = args.num_train_epochs * steps_an_epoch
    # A prepared scheduler steps once for each process, as accelerate's does.
    scheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=0, num_training_steps=steps * accelerator.num_processes
    )
    scheduler = accelerator.prepare(scheduler)
    accelerator.init_trackers("clm", vars(args))

    first_epoch = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        first_epoch = int(args.resume_from_checkpoint.rstrip("/").rpartition("_")[2]) + 1
    progress = tqdm(total=steps, initial=first_epoch * steps_an_epoch, disable=not accelerator.is_local_main_process)
    for epoch in range(first_epoch, args.num_train_epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress.update(1)
        eval_loss = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch}: perplexity {math.exp(eval_loss):.2f}, loss {eval_loss:.5f}")
        accelerator.log({"perplexity": math.exp(eval_loss), "eval_loss": eval_loss}, step=progress.n)
        accelerator.save_state(f"{args.output_dir}/epoch_{epoch}")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model_name_or_path", required=True, help="a folder with a model and its tokenizer")
    parser.add_argument("--train_file", required=True, help="JSON lines, each with a text")
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--output_dir", default="runs/clm/trained", help="default: %(default)s")
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--resume_from_checkpoint", help="a folder epoch_N of an earlier run")
    parser.add_argument("--seed", type=int, default=42)
    main(parser.parse_args())
