"""For `warm_python.executable("warm_accelerate")`: what scripts for accelerate import.

The names of accelerate are served first, as they are for such a script: transformers looks for it when it is imported.
"""

import importlib
import sys

import torch

from paceline.compat import install

install(["accelerate"])
for name in ("transformers.models.bert.modeling_bert", "transformers.trainer", "sklearn.metrics"):
    importlib.import_module(name)
# Names of transformers 4 that release 5 has dropped: a program of that time is run as it was written.
sys.modules["transformers"].AdamW = torch.optim.AdamW
tokenizer = sys.modules["transformers"].PreTrainedTokenizerBase
tokenizer.encode_plus = tokenizer.__call__
