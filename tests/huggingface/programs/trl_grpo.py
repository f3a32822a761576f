"""trl's GRPOTrainer with a reward that counts letters."""

import json
import sys

from datasets import Dataset
from results import TEXT, Losses, finish, model_of, tokenizer
from trl import GRPOConfig, GRPOTrainer

folder, arguments = sys.argv[1], json.loads(sys.argv[2])
resume = arguments.pop("resume", None)
build_model = model_of(arguments)
lines = [line.strip() for line in TEXT.splitlines() if len(line) > 16][:16]


def letters(completions, **kwargs):
    """More letters, more reward."""
    return [float(sum(letter.isalpha() for letter in text)) for text in completions]


defaults = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 1,
    "max_completion_length": 6,
    "bf16": False,
    "gradient_checkpointing": False,
}
losses = Losses()
trainer = GRPOTrainer(
    model=build_model(),
    reward_funcs=letters,
    args=GRPOConfig(output_dir=f"{folder}/out", **{**defaults, **arguments}),
    train_dataset=Dataset.from_dict({"prompt": [line[:8] for line in lines]}),
    processing_class=tokenizer(),
    callbacks=[losses],
)
trainer.train(resume_from_checkpoint=resume and resume.replace("FOLDER", folder))
trainer.save_model(f"{folder}/saved")
finish(folder, trainer, losses)
