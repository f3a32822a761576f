"""trl's SFTTrainer: packing, or losses on the assistant's words alone."""

import json
import sys

from datasets import Dataset
from results import TEXT, Losses, finish, model_of, tokenizer
from trl import SFTConfig, SFTTrainer

folder, arguments = sys.argv[1], json.loads(sys.argv[2])
resume = arguments.pop("resume", None)
build_model = model_of(arguments)
lines = [line.strip() for line in TEXT.splitlines() if len(line) > 12][:40]
if arguments.get("assistant_only_loss"):
    talks = [[{"role": "user", "content": line[:6]}, {"role": "assistant", "content": line[6:14]}] for line in lines]
    data = Dataset.from_dict({"messages": talks})
else:
    data = Dataset.from_dict({"text": lines})
defaults = {
    "max_steps": 6,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 1,
    "max_length": 48,
    "bf16": False,
    "gradient_checkpointing": False,
}
losses = Losses()
trainer = SFTTrainer(
    model=build_model(),
    args=SFTConfig(output_dir=f"{folder}/out", **{**defaults, **arguments}),
    train_dataset=data,
    eval_dataset=data.select(range(8)),
    processing_class=tokenizer(),
    callbacks=[losses],
)
trainer.train(resume_from_checkpoint=resume and resume.replace("FOLDER", folder))
trainer.save_model(f"{folder}/saved")
finish(folder, trainer, losses, eval_loss=trainer.evaluate()["eval_loss"])
