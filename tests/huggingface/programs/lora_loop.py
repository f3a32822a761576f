"""LoRA adapters by peft in a loop of one's own, as in peft's examples: trained, evaluated, saved, merged, and resumed."""

import json
import sys

import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from results import files, language_model, summary, token_rows, write
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_scheduler

folder, options = sys.argv[1], json.loads(sys.argv[2])
accelerator = Accelerator(cpu=True)
kind, dropout, batch_size = options.get("model", "gpt2"), options.get("dropout", 0.1), options.get("batch_size", 4)
targets = ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]
adapters = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets, fan_in_fan_out=kind == "gpt2")
model = get_peft_model(language_model(kind=kind, dropout=dropout), adapters)
collated = {"collate_fn": default_data_collator, "batch_size": batch_size}
torch.manual_seed(7)
train_loader = DataLoader(token_rows(48), shuffle=True, **collated)
eval_loader = DataLoader(token_rows(16), **collated)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scheduler = get_scheduler("linear", optimizer, 0, 12 * accelerator.num_processes)
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)
loader, losses, done = train_loader, [], 0
if options.get("resume"):
    accelerator.load_state(f"{folder}/half")
    loader, done = accelerator.skip_first_batches(train_loader, 3), 3
model.train()
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    done += 1
    losses.append([accelerator.reduce(loss.detach(), "mean").item(), float(norm), scheduler.get_last_lr()[0]])
    if done == 3 and not options.get("resume"):
        accelerator.save_state(f"{folder}/half")
model.eval()
rows = []
for batch in eval_loader:
    with torch.no_grad():
        loss = model(**batch).loss
    rows.append(accelerator.gather_for_metrics(loss.repeat(batch["input_ids"].shape[0])))
state = accelerator.get_state_dict(model)
adapter = accelerator.unwrap_model(model)
adapter.save_pretrained(f"{folder}/saved", state_dict=state, is_main_process=accelerator.is_main_process)
accelerator.wait_for_everyone()
merged = PeftModel.from_pretrained(language_model(kind=kind, dropout=dropout), f"{folder}/saved").merge_and_unload()
accelerator.end_training()
write(
    folder,
    losses=losses,
    evaluated=torch.cat(rows).mean().item(),
    merged=summary(merged.state_dict()),
    saved=files(folder, "saved"),
)
