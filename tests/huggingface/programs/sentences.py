"""sentence-transformers' trainer on pairs of lines."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from results import TEXT, Losses, finish, tokenizer
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    models,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from transformers import BertConfig, BertModel

folder, arguments = sys.argv[1], json.loads(sys.argv[2])
base = Path(folder) / "base"
torch.manual_seed(0)
config = BertConfig(
    vocab_size=258, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, pad_token_id=0
)
BertModel(config).save_pretrained(base)
tokenizer().save_pretrained(base)
words = models.Transformer(str(base), max_seq_length=32)
model = SentenceTransformer(modules=[words, models.Pooling(32)], device="cpu")
lines = [line.strip() for line in TEXT.splitlines() if len(line) > 12][:40]
data = Dataset.from_dict({"anchor": [line[:10] for line in lines], "positive": [line[2:12] for line in lines]})
defaults = {
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 1,
}
losses = Losses()
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(output_dir=f"{folder}/out", **{**defaults, **arguments}),
    train_dataset=data,
    loss=MultipleNegativesRankingLoss(model),
    callbacks=[losses],
)
trainer.train()
finish(folder, trainer, losses)
