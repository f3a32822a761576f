"""Adapts a language model with LoRA, using peft and transformers' Trainer, and writes the merged model.

python examples/causal_language_model/make_data.py
paceline launch --compat accelerate --procs 2 examples/lora/train.py

peft requires accelerate, and Paceline serves this name. So install peft with `pip install --no-deps peft`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "causal_language_model"))
from texts import read_blocks


def main(args: argparse.Namespace) -> None:
    """Trains only the adapter; the base model does not change."""
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    base = AutoModelForCausalLM.from_pretrained(args.model)
    adapter = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=args.rank,
        lora_alpha=2 * args.rank,
        lora_dropout=0.05,
        target_modules=["c_attn"],
    )
    model = get_peft_model(base, adapter)
    training = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=read_blocks(args.train_file, tokenizer, 64),
        eval_dataset=read_blocks(args.validation_file, tokenizer, 64),
        data_collator=default_data_collator,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(args.out / "adapter"))
    if trainer.is_world_process_zero():
        trained, total = model.get_nb_trainable_parameters()
        merged = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
        merged.save_pretrained(args.out / "merged")
        print(f"{trained:,} of {total:,} parameters were trained; held-out loss {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="runs/clm/gpt2", help="a folder with a model and its tokenizer (default: %(default)s)"
    )
    parser.add_argument("--train_file", default="runs/clm/train.json")
    parser.add_argument("--validation_file", default="runs/clm/validation.json")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args())
