"""Lists fields, flags and variables of the real accelerate's engines: `python list_engines.py > engines.json`.

Run it where accelerate 1.15.0 and torch are installed; see record.py.
"""

import json
import re
from dataclasses import fields
from pathlib import Path

import accelerate
from accelerate.commands.launch import launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import dataclasses as found
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

CLASSES = (
    ParallelismConfig,
    found.FullyShardedDataParallelPlugin,
    found.TorchTensorParallelPlugin,
    found.TorchTensorParallelConfig,
    found.TorchContextParallelConfig,
    found.DeepSpeedSequenceParallelConfig,
    found.TorchDynamoPlugin,
    MixedPrecision,
    MixedPrecisionPolicy,
)
BEGINNINGS = ("fsdp_", "parallelism_config_", "dynamo_", "use_fsdp")


def main():
    listed = {cls.__name__: [each.name for each in fields(cls)] for cls in CLASSES}
    flags = sorted({each.dest for each in launch_command_parser()._actions if each.dest.startswith(BEGINNINGS)})
    source = (Path(accelerate.__file__).parent / "utils" / "dataclasses.py").read_text(encoding="utf-8")
    plugin = source[source.index("class FullyShardedDataParallelPlugin") :]
    plugin = plugin[: plugin.index("\n@dataclass")]
    variables = {f"FSDP_{name}" for name in re.findall(r'env_prefix \+ "([A-Z_]+)"', plugin)}
    variables |= {name.upper() for name in flags if name.startswith("parallelism_config_")}
    variables |= {f"ACCELERATE_{name.upper()}" for name in flags if name.startswith("dynamo_")}
    print(json.dumps({"fields": listed, "flags": flags, "variables": sorted(variables)}, indent=1))


if __name__ == "__main__":
    main()
