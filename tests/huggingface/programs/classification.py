"""`Trainer` with sequence classification, rows of unequal length and a metric over all of them."""

import json
import sys

import torch
from results import TEXT, Losses, finish, tokenizer
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, Trainer, TrainingArguments

folder, arguments = sys.argv[1], json.loads(sys.argv[2])
words = tokenizer()
lines = [line for line in TEXT.splitlines() if len(line) > 8][:90]
rows = [
    {**words(line[: 8 + number % 20]), "label": int("self" in line or "def" in line)}
    for number, line in enumerate(lines)
]
torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=258, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, pad_token_id=0
    )
)
defaults = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
}
losses = Losses()
trainer = Trainer(
    model=model,
    args=TrainingArguments(output_dir=f"{folder}/out", **{**defaults, **arguments}),
    train_dataset=rows[:67],
    eval_dataset=rows[67:],
    data_collator=DataCollatorWithPadding(words),
    compute_metrics=lambda given: {"accuracy": float((given.predictions.argmax(-1) == given.label_ids).mean())},
    callbacks=[losses],
)
trainer.train()
predictions = trainer.predict(rows[67:])
best = str(trainer.state.best_model_checkpoint).rpartition("-")[2]
finish(folder, trainer, losses, predictions=predictions.predictions.tolist(), best=best)
