"""A loop of one's own, as in `run_clm_no_trainer.py`: accumulation, scheduler, tracker, evaluation, and a resume."""

import json
import math
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from results import language_model, summary, token_rows, write
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_scheduler

folder, options = sys.argv[1], json.loads(sys.argv[2])


def run(resume):
    """Two epochs; the second time from the middle of the first."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        mixed_precision=options.get("mixed_precision"),
        log_with=options.get("log_with"),
        project_dir=folder,
        dataloader_config=DataLoaderConfiguration(**options.get("loader", {})),
    )
    set_seed(7)
    model = language_model()
    shuffled = {"shuffle": True, "collate_fn": default_data_collator, "batch_size": 4}
    train_loader = DataLoader(token_rows(45), **shuffled, num_workers=options.get("workers", 0))
    eval_loader = DataLoader(token_rows(13), collate_fn=default_data_collator, batch_size=4)
    # Paceline steps in the fused kernel anyway; with it on both sides the numbers are equal to the bit.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = get_scheduler("linear", optimizer, 2 * accelerator.num_processes, 12 * accelerator.num_processes)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    if options.get("log_with"):
        accelerator.init_trackers("clm", {"seed": 7})
    done, losses, first_epoch, skipped = 0, [], 0, 0
    if resume:
        accelerator.load_state(f"{folder}/half")
        done = 6
        first_epoch, skipped = divmod(6, len(train_loader))
    for epoch in range(first_epoch, 2):
        model.train()
        loader = train_loader
        if skipped:
            loader, skipped = accelerator.skip_first_batches(train_loader, skipped), 0
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            done += 1
            losses.append([loss.item(), float(norm) if accelerator.sync_gradients else 0.0, scheduler.get_last_lr()[0]])
            # In case the run never ends.
            write(folder, losses=losses, is_partial=True)
            if done == 6 and not resume:
                accelerator.save_state(f"{folder}/half")
        model.eval()
        rows = []
        for batch in eval_loader:
            with torch.no_grad():
                loss = model(**batch).loss
            rows.append(accelerator.gather_for_metrics(loss.repeat(batch["input_ids"].shape[0])))
        mean = torch.cat(rows).mean().item()
        losses.append([mean, math.exp(mean), float(len(torch.cat(rows)))])
        if options.get("log_with"):
            accelerator.log({"loss": mean}, step=epoch)
    weights = summary(accelerator.get_state_dict(model))
    accelerator.end_training()
    write(folder, losses=losses, weights=weights)


run(options.get("resume", False))
