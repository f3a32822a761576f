"""Records commands_program.py under the real accelerate 1.15: `python record_commands.py`; writes recorded_commands.json."""

import json
import os
import tempfile
from pathlib import Path

# Defaults name the folder of the user's own config file.
os.environ["HF_HOME"] = os.path.join(tempfile.gettempdir(), "no-config-here")

import commands_program

HERE = Path(__file__).parent
found = json.dumps(commands_program.everything(), indent=1, sort_keys=True).replace(os.environ["HF_HOME"], "HF_HOME")
(HERE / "recorded_commands.json").write_text(found + "\n", encoding="utf-8")
