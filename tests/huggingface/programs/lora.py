"""LoRA adapters by peft in the Trainer: trained, saved, merged."""

import json
import sys

from peft import LoraConfig, PeftModel, get_peft_model
from results import Losses, finish, model_of, summary, token_rows
from transformers import Trainer, TrainingArguments, default_data_collator

folder, arguments = sys.argv[1], json.loads(sys.argv[2])
resume = arguments.pop("resume", None)
rows = token_rows(arguments.pop("rows", 33))
arguments.pop("eval_rows", None)
dropout = arguments.get("dropout", 0.1)
is_gpt2 = arguments.get("model", "gpt2") == "gpt2"
build_model = model_of(arguments)
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
args = TrainingArguments(output_dir=f"{folder}/out", **{**defaults, **arguments})
targets = ["c_attn"] if is_gpt2 else ["q_proj", "v_proj"]
adapters = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets, fan_in_fan_out=is_gpt2)
model = get_peft_model(build_model(), adapters)
losses = Losses()
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows,
    data_collator=default_data_collator,
    callbacks=[losses],
)
trainer.train(resume_from_checkpoint=resume and resume.replace("FOLDER", folder))
trainer.save_model(f"{folder}/saved")
trainer.accelerator.wait_for_everyone()
# What a user does with an adapter that was saved, in a process of its own or here.
merged = PeftModel.from_pretrained(build_model(), f"{folder}/saved").merge_and_unload()
finish(folder, trainer, losses, merged=summary(merged.state_dict()))
