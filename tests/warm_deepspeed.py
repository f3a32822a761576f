"""For `warm_python.executable("warm_deepspeed")`: what a Trainer with a DeepSpeed config imports.

The names of both libraries are served first, as they are for such a script: transformers looks for them when it is imported.
"""

import importlib

from paceline.compat import install

install(["accelerate", "deepspeed"])
for name in ("transformers.models.gpt2.modeling_gpt2", "transformers.trainer", "transformers.integrations.deepspeed"):
    importlib.import_module(name)
