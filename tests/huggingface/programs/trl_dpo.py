"""trl's DPOTrainer, with a reference model or with log-probabilities computed before."""

import json
import sys

from datasets import Dataset
from results import TEXT, Losses, finish, model_of, tokenizer
from trl import DPOConfig, DPOTrainer

folder, arguments = sys.argv[1], json.loads(sys.argv[2])
resume = arguments.pop("resume", None)
build_model = model_of(arguments)
lines = [line.strip() for line in TEXT.splitlines() if len(line) > 16][:20]
data = Dataset.from_dict(
    {
        "prompt": [line[:6] for line in lines],
        "chosen": [line[6:12] for line in lines],
        "rejected": [line[12:6:-1] for line in lines],
    }
)
defaults = {
    "max_steps": 5,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
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
trainer = DPOTrainer(
    model=build_model(),
    ref_model=build_model(),
    args=DPOConfig(output_dir=f"{folder}/out", **{**defaults, **arguments}),
    train_dataset=data,
    eval_dataset=data.select(range(8)),
    processing_class=tokenizer(),
    callbacks=[losses],
)
trainer.train(resume_from_checkpoint=resume and resume.replace("FOLDER", folder))
trainer.save_model(f"{folder}/saved")
finish(folder, trainer, losses, eval_loss=trainer.evaluate()["eval_loss"])
