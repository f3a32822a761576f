"""`Seq2SeqTrainer` with generation in its evaluation."""

import json
import sys

import torch
from results import TEXT, Losses, finish, tokenizer
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

folder, arguments = sys.argv[1], json.loads(sys.argv[2])
resume, num_rows = arguments.pop("resume", None), arguments.pop("rows", 29)
words = tokenizer()
lines = [line.strip() for line in TEXT.splitlines() if len(line) > 8][:40]
rows = []
for number, line in enumerate(lines):
    source = words(line[: 6 + number % 10])
    rows.append({**source, "labels": words(line[: 3 + number % 4])["input_ids"] + [1]})
torch.manual_seed(0)
model = T5ForConditionalGeneration(
    T5Config(
        vocab_size=258,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        dropout_rate=arguments.pop("dropout", 0.1),
    )
)
defaults = {
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "predict_with_generate": True,
    "generation_max_length": 8,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 2,
}
losses = Losses()
trainer = Seq2SeqTrainer(
    model=model,
    args=Seq2SeqTrainingArguments(output_dir=f"{folder}/out", **{**defaults, **arguments}),
    train_dataset=rows[:num_rows],
    eval_dataset=rows[num_rows:],
    data_collator=DataCollatorForSeq2Seq(words, model=model),
    compute_metrics=lambda given: {"tokens": int((given.predictions > 1).sum()), "rows": len(given.predictions)},
    callbacks=[losses],
)
trainer.train(resume_from_checkpoint=resume and resume.replace("FOLDER", folder))
trainer.save_model(f"{folder}/saved")
evaluated = trainer.evaluate()
finish(folder, trainer, losses, evaluated=[evaluated["eval_loss"], evaluated["eval_tokens"], evaluated["eval_rows"]])
