"""`Trainer` with a causal language model: python clm.py FOLDER ARGUMENTS, as JSON of TrainingArguments.

Words of ARGUMENTS that are ours: "resume" (a checkpoint to go on from), "stream" (an iterable data set), "rows" and "eval_rows"
(how many), "gathers" (see `finish`), and those of `results.model_of`.
"""

import json
import sys

from results import Losses, finish, model_of, token_rows, tokenizer
from torch.utils.data import IterableDataset
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments, default_data_collator


class Stream(IterableDataset):
    """Rows one after another, without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


def main():
    """Trains, evaluates and saves."""
    folder, arguments = sys.argv[1], json.loads(sys.argv[2])
    resume = arguments.pop("resume", None)
    stream = arguments.pop("stream", False)
    build_model = model_of(arguments)
    gathers = arguments.pop("gathers", True)
    rows = token_rows(arguments.pop("rows", 61))
    evaluation = token_rows(arguments.pop("eval_rows", 13))
    groups_by_length = arguments.get("train_sampling_strategy") == "group_by_length"
    if groups_by_length:
        for number, row in enumerate(rows):
            del (
                row["input_ids"][4 + number % 12 :],
                row["attention_mask"][4 + number % 12 :],
                row["labels"][4 + number % 12 :],
            )
    defaults = {
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
        "data_seed": 5,
    }
    args = TrainingArguments(output_dir=f"{folder}/out", **{**defaults, **arguments})
    losses = Losses()
    collator = DataCollatorForSeq2Seq(tokenizer()) if groups_by_length else default_data_collator
    trainer = Trainer(
        model=build_model(),
        args=args,
        train_dataset=Stream(rows) if stream else rows,
        eval_dataset=evaluation,
        data_collator=collator,
        callbacks=[losses],
    )
    trainer.train(resume_from_checkpoint=resume and resume.replace("FOLDER", folder))
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/saved")
    finish(folder, trainer, losses, gathers, eval_loss=evaluated)


if __name__ == "__main__":  # loaders with spawned workers import this file
    main()
