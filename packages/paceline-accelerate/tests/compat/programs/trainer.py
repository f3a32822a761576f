"""Trains a small language model with `transformers.Trainer`, and once more from the checkpoint half way.

python trainer.py FOLDER OPTIONS: writes FOLDER/rank_<n>.json with what both runs ended with.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
torch.manual_seed(0)
is_llama = options.pop("model", "gpt2") == "llama"
sizes = {"vocab_size": 17, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
rows = [{"input_ids": (ids := torch.arange(start, start + 8) % 17), "labels": ids} for start in range(50)]
args = TrainingArguments(
    str(folder / "out"), max_steps=12, per_device_train_batch_size=4, learning_rate=2e-2, logging_steps=3, save_steps=6,
    report_to=[], use_cpu=True, disable_tqdm=True, seed=1, **options,
)  # fmt: skip
found = []
for checkpoint in (None, str(folder / "out" / "checkpoint-6")):
    if is_llama:  # whose layers a plan with tp knows
        layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=17, **layers))
    else:
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:11])
    trainer.train(resume_from_checkpoint=checkpoint)
    whole = trainer.accelerator.get_state_dict(trainer.model)
    found.append(
        {
            "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
            "weights": {name: value.tolist() for name, value in whole.items()},
            "evaluation": trainer.evaluate()["eval_loss"],
            "predictions": list(trainer.predict(rows[:11]).predictions.shape),
            "processes": trainer.accelerator.num_processes,
            "precision": [args.mixed_precision, trainer.accelerator.mixed_precision],
        }
    )
    trainer.save_model(str(folder / "saved"))
(folder / f"rank_{args.process_index}.json").write_text(json.dumps(found), encoding="utf-8")
