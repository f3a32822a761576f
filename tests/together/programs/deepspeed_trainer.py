"""Trains a small language model with `transformers.Trainer` and DeepSpeed, and once more from the checkpoint half way.

python deepspeed_trainer.py FOLDER OPTIONS: writes FOLDER/rank_<n>.json with what both runs ended with. `OPTIONS` is JSON: the
arguments of `TrainingArguments`, among them `deepspeed`, a DeepSpeed config.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
resumes = options.pop("resumes", True)
sizes = {"vocab_size": 17, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
rows = []
for start in range(50):
    ids = torch.arange(start, start + 8) % 17
    rows.append({"input_ids": ids, "labels": ids})
results = []
for checkpoint in (None, str(folder / "out" / "checkpoint-4"))[: 1 + resumes]:
    # New arguments for each run: the real accelerate takes DeepSpeed's plugin for the first accelerator alone.
    args = TrainingArguments(
        str(folder / "out"), max_steps=8, per_device_train_batch_size=4, learning_rate=2e-2, logging_steps=1, save_steps=4,
        report_to=[], disable_tqdm=True, seed=1, train_sampling_strategy="sequential", **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))
    trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:16])
    trainer.train(resume_from_checkpoint=checkpoint)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluation = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "saved"))
    trainer.accelerator.wait_for_everyone()
    results.append(
        {
            "losses": [step["loss"] for step in steps],
            "norms": [step["grad_norm"] for step in steps],
            "rates": [step["learning_rate"] for step in steps],
            "evaluation": evaluation,
            "processes": trainer.accelerator.num_processes,
            "type": str(trainer.accelerator.distributed_type),
            "engine": type(trainer.model_wrapped).__name__,
            "saved": sorted(path.name for path in (folder / "saved").iterdir()),
        }
    )
(folder / f"rank_{args.process_index}.json").write_text(json.dumps(results), encoding="utf-8")
