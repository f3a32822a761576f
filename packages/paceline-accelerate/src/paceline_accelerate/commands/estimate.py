"""`accelerate estimate-memory`: prints how much memory a model takes, from its config or its folder on this machine.

Nothing is downloaded: a name that is not a folder is looked up in the local cache of Hugging Face's hub.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import Problem
from paceline_accelerate.commands.arguments import parser_for
from paceline_accelerate.errors import CompatImportError, MissingModel

_DTYPES = ["float32", "float16", "int8", "int4"]
_HEADERS = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
# How many elements of a dtype take the space of one float32 element.
_ELEMENTS_PER_FLOAT32 = {"float32": 1, "float16": 2, "bfloat16": 2, "int8": 4, "int4": 8}


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of `accelerate estimate-memory`."""
    parser = parser_for("estimate-memory", "", estimate_command, subparsers, description="Says what a model takes.")
    add = parser.add_argument
    add("model_name", type=str, help="a model's folder or config.json; or its name, where the hub's cache has it")
    libraries = ["timm", "transformers"]
    add("--library_name", "--library-name", type=str, choices=libraries, help="the library that the model is for")
    add("--dtypes", type=str, nargs="+", default=_DTYPES, choices=_DTYPES, help="of the weights [all of these]")
    names = ("--trust_remote_code", "--trust-remote-code")
    add(*names, action="store_true", default=False, help="run code that the folder brings")
    return parser


def create_empty_model(
    model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None
) -> Any:
    """Returns the model on the meta device, where it takes no memory.

    Raises:
        MissingModel: `compat-model`, where there is no such config on this machine.
        CompatImportError: `compat-model`, where the library of the model is not installed.
    """
    _require(library_name or "transformers", model_name)
    if library_name == "timm":
        return _empty_timm_model(model_name)
    from transformers import AutoConfig, AutoModel

    from paceline_accelerate.big_modeling import init_empty_weights

    try:
        with environment.patched({"HF_HUB_OFFLINE": "1"}):
            config = AutoConfig.from_pretrained(
                model_name, trust_remote_code=trust_remote_code, token=access_token, local_files_only=True
            )
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        fix = "name a folder that holds the model's config.json, as `save_pretrained` writes it"
        problem = Problem("compat-model", f"{model_name} is no model on this machine.", reason, fix)
        raise MissingModel.of([problem]) from None
    with init_empty_weights():
        return AutoModel.from_config(config, trust_remote_code=trust_remote_code)


def add_timm_hub_prefix(model_name: str) -> str:
    """Returns the name as `timm.create_model` takes it: a name of the hub, such as "timm/resnet50", gets "hf-hub:"."""
    has_source = ":" in model_name
    is_of_hub = "/" in model_name and not has_source
    return f"hf-hub:{model_name}" if is_of_hub else model_name


def check_has_model(error: BaseException) -> str:
    """Returns which library says by an error that it has no such model: "timm", "transformers" or "unknown"."""
    text = str(error.args[0]) if error.args else ""
    if isinstance(error, RuntimeError) and text.startswith("Unknown model"):
        return "timm"
    if isinstance(error, OSError) and "does not appear to have a file named" in text:
        return "transformers"
    return "unknown"


def _require(library: str, model_name: str) -> None:
    if find_spec(library) is None:
        raise CompatImportError(
            "compat-model",
            f"{library} is not installed, so {model_name} cannot be built.",
            why="a model is built from its config by the library that it is for",
            fix=f"run `pip install {library}`",
        )


def _empty_timm_model(name: str) -> Any:
    import timm

    from paceline_accelerate.big_modeling import init_empty_weights

    with init_empty_weights():
        return timm.create_model(name.removeprefix("timm/"), pretrained=False)


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Returns the bytes that a training step with Adam takes.

    Args:
        bytes: size of the weights in float32.
        mixed_precision: "float32", "float16" or "bfloat16". A model cannot be trained in any other: all values are -1.
        msamp_config: accepted, and without effect.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "gradients": bytes, "optimizer": bytes * 2, "step": bytes * 4}
    if mixed_precision in ("float16", "bfloat16"):
        # Weights and the optimizer's states stay in float32; gradients are held in both for a moment.
        return {"model": bytes, "gradients": bytes + bytes // 2, "optimizer": bytes * 2, "step": bytes * 2}
    return dict.fromkeys(("model", "gradients", "optimizer", "step"), -1)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Returns a row for each dtype: its name, the largest layer, the whole model, and a training step; in bytes.

    Raises:
        CompatError: as `create_empty_model`.
    """
    from paceline_accelerate.module_sizes import calculate_maximum_sizes

    name = args.model_name
    if name.endswith("config.json"):
        name = str(Path(name).parent)
    model = create_empty_model(name, args.library_name, args.trust_remote_code)
    total_bytes, (largest_bytes, _) = calculate_maximum_sizes(model)
    rows = []
    for dtype in args.dtypes:
        divisor = _ELEMENTS_PER_FLOAT32[dtype]
        training = estimate_training_usage(total_bytes, dtype)
        rows.append([dtype, largest_bytes / divisor, total_bytes / divisor, training])
    return rows


def create_ascii_table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> str:
    """Returns a table in a frame: the title, the headers, and the rows."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    # The title spans all columns and the bars between them. The last column is widened until it has room.
    inner_width = sum(widths) + len(widths) - 1
    widths[-1] += max(0, len(title) - inner_width)
    bars = ["─" * width for width in widths]
    top = f"┌{'─'.join(bars)}┐"
    lines = [top, f"│{title.center(len(top) - 2)}│", f"├{'┬'.join(bars)}┤"]
    for number, row in enumerate((headers, *rows)):
        cells = [cell.center(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"│{'│'.join(cells)}│")
        if number == 0:
            lines.append(f"├{'┼'.join(bars)}┤")
    lines.append(f"└{'┴'.join(bars)}┘")
    return "\n".join(lines)


def estimate_command(args: argparse.Namespace) -> None:
    """Prints the table."""
    from paceline_accelerate.module_sizes import convert_bytes

    rows = []
    for dtype, largest_bytes, total_bytes, training in gather_data(args):
        peak_bytes = max(training.values())
        peak = "N/A" if peak_bytes < 0 else str(convert_bytes(peak_bytes))
        rows.append([dtype, str(convert_bytes(largest_bytes)), str(convert_bytes(total_bytes)), peak])
    title = f"Memory Usage for loading `{args.model_name}`"
    print(create_ascii_table(_HEADERS, rows, title))


def main() -> int:
    """Runs the command `accelerate-estimate-memory`."""
    from paceline_accelerate.commands.accelerate_cli import reporting

    return reporting(lambda: estimate_command(estimate_command_parser().parse_args()))
