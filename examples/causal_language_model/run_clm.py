"""Trains a causal language model with transformers' Trainer, which uses accelerate; Paceline takes the place of accelerate.

paceline launch --compat accelerate --config_file path_to_config.yaml examples/causal_language_model/run_clm.py \
    --model_name_or_path runs/clm/gpt2 --train_file runs/clm/train.json --validation_file runs/clm/validation.json \
    --output_dir runs/clm/trained --do_train --do_eval --per_device_train_batch_size 16 --gradient_accumulation_steps 4

All arguments of `transformers.TrainingArguments` are flags.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from texts import read_blocks
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class DataArguments:
    """The model, and the data that it is trained on."""

    model_name_or_path: str = field(metadata={"help": "a folder with a model and its tokenizer"})
    train_file: str = field(metadata={"help": "JSON lines, each with a text"})
    validation_file: str | None = field(default=None, metadata={"help": "the same for --do_eval"})
    block_size: int = field(default=64, metadata={"help": "tokens in a row"})


def main() -> None:
    """Trains and evaluates as the flags say."""
    data, training = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(data.model_name_or_path)
    train_rows = read_blocks(data.train_file, tokenizer, data.block_size)
    eval_rows = None
    if data.validation_file:
        eval_rows = read_blocks(data.validation_file, tokenizer, data.block_size)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(data.model_name_or_path),
        args=training,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if training.do_train:
        result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
    if training.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
