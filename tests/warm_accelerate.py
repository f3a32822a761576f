"""For `warm_python.executable("warm_accelerate")`: what scripts for accelerate import.

The names of accelerate are served first, as they are for such a script: transformers looks for it when it is imported.
"""

import importlib
import sys

from paceline.compat import install
from paceline.compat.adamw import AdamW

install(["accelerate"])
for name in ("transformers.models.bert.modeling_bert", "transformers.trainer", "sklearn.metrics"):
    importlib.import_module(name)
# transformers has put a new module in the place of the one to which `install` had added this name.
sys.modules["transformers"].AdamW = AdamW
