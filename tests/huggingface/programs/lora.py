"""LoRA adapters by peft in the Trainer: trained, saved, merged."""

import json
import sys

from peft import LoraConfig, get_peft_model
from results import Losses, finish, language_model, summary, token_rows
from transformers import Trainer, TrainingArguments, default_data_collator

folder, arguments = sys.argv[1], json.loads(sys.argv[2])
model = get_peft_model(
    language_model(), LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
)
defaults = {
    "max_steps": 8,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 1,
}
losses = Losses()
trainer = Trainer(
    model=model,
    args=TrainingArguments(output_dir=f"{folder}/out", **{**defaults, **arguments}),
    train_dataset=token_rows(33),
    data_collator=default_data_collator,
    callbacks=[losses],
)
trainer.train()
trainer.save_model(f"{folder}/adapter")
merged = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
finish(folder, trainer, losses, merged=summary(merged.state_dict()))
