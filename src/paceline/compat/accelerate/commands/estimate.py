"""`accelerate estimate-memory`: what a model takes, from a config or a model folder on this machine.

Nothing is downloaded: a name that is no folder is looked for in the cache of Hugging Face's hub.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import CompatError
from paceline.compat.accelerate.commands.arguments import CustomArgumentParser, parser_for

_DTYPES = ["float32", "float16", "int8", "int4"]
_HEADERS = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
# float32 elements are this many times as large.
_SMALLER = {"float32": 1, "float16": 2, "bfloat16": 2, "int8": 4, "int4": 8}


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate estimate-memory`."""
    parser = parser_for("estimate-memory", "", estimate_command, subparsers, description="Says what a model takes.")
    hyphens = () if isinstance(parser, CustomArgumentParser) else ("--library-name",)
    add = parser.add_argument
    add("model_name", type=str, help="a model's folder or config.json; or its name, where the hub's cache has it")
    add("--library_name", *hyphens, type=str, choices=["timm", "transformers"], help="the library that it is for")
    add("--dtypes", type=str, nargs="+", default=_DTYPES, choices=_DTYPES, help="of the weights [all of these]")
    hyphens = () if isinstance(parser, CustomArgumentParser) else ("--trust-remote-code",)
    add("--trust_remote_code", *hyphens, action="store_true", default=False, help="run code that the folder brings")
    return parser


def create_empty_model(
    model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None
) -> Any:
    """The model on the meta device, where it takes no memory.

    Raises:
        CompatError: `compat-model`, where there is no such config on this machine.
    """
    if library_name == "timm":
        return _of_timm(model_name)
    from transformers import AutoConfig, AutoModel

    from paceline.compat.accelerate.big_modeling import init_empty_weights

    try:
        with environment.patched({"HF_HUB_OFFLINE": "1"}):
            config = AutoConfig.from_pretrained(
                model_name, trust_remote_code=trust_remote_code, token=access_token, local_files_only=True
            )
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        fix = "name a folder that holds the model's config.json, as `save_pretrained` writes it"
        raise CompatError("compat-model", f"{model_name} is no model on this machine.", reason, fix) from None
    with init_empty_weights():
        return AutoModel.from_config(config, trust_remote_code=trust_remote_code)


def add_timm_hub_prefix(model_name: str) -> str:
    """The name as `timm.create_model` takes it: a name of the hub, such as "timm/resnet50", gets "hf-hub:" before it."""
    names_a_source = ":" in model_name
    return f"hf-hub:{model_name}" if "/" in model_name and not names_a_source else model_name


def check_has_model(error: BaseException) -> str:
    """Which library says by an error that it has no such model: "timm", "transformers" or "unknown"."""
    text = str(error.args[0]) if error.args else ""
    if isinstance(error, RuntimeError) and text.startswith("Unknown model"):
        return "timm"
    if isinstance(error, OSError) and "does not appear to have a file named" in text:
        return "transformers"
    return "unknown"


def _of_timm(name: str) -> Any:
    import timm

    from paceline.compat.accelerate.big_modeling import init_empty_weights

    with init_empty_weights():
        return timm.create_model(name.removeprefix("timm/"), pretrained=False)


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """What a training step takes, with weights of a size.

    Args:
        bytes: of the weights in float32.
        mixed_precision: "float32", or a half precision; -1 stands for what cannot be trained so.
        msamp_config: accepted, and without effect.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "gradients": bytes, "optimizer": bytes * 2, "step": bytes * 4}
    if mixed_precision in ("float16", "bfloat16"):
        # Weights and the optimizer's states stay in float32; gradients are held in both for a moment.
        return {"model": bytes, "gradients": bytes + bytes // 2, "optimizer": bytes * 2, "step": bytes * 2}
    return dict.fromkeys(("model", "gradients", "optimizer", "step"), -1)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """A row for each dtype: its name, the largest layer, the whole model, and a training step; in bytes.

    Raises:
        CompatError: as `create_empty_model`.
    """
    name = args.model_name
    if name.endswith("config.json"):
        name = str(Path(name).parent)
    model = create_empty_model(name, args.library_name, args.trust_remote_code)
    total, largest = _sizes(model)
    rows = []
    for dtype in args.dtypes:
        divisor = _SMALLER[dtype]
        rows.append([dtype, largest / divisor, total / divisor, estimate_training_usage(total, dtype)])
    return rows


def _sizes(model: Any) -> tuple[int, int]:
    """Bytes of the model and of its largest layer, in float32."""
    from paceline.compat.accelerate.module_sizes import compute_module_sizes, get_max_layer_size

    sizes = compute_module_sizes(model)
    children = list(model.named_children())
    blocks = list(getattr(model, "_no_split_modules", None) or [])
    largest, _ = get_max_layer_size(children, sizes, blocks)
    return int(sizes[""]), int(largest)


def create_ascii_table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> str:
    """The rows as lined-up text in a frame, under a title."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    # The last column is widened until the title has room.
    widths[-1] += max(0, len(title) - sum(widths) - len(widths) + 1)
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
    from paceline.compat.accelerate.module_sizes import convert_bytes

    rows = []
    for dtype, largest, total, steps in gather_data(args):
        peak = max(steps.values())
        step = "N/A" if peak < 0 else str(convert_bytes(peak))
        rows.append([dtype, str(convert_bytes(largest)), str(convert_bytes(total)), step])
    title = f"Memory Usage for loading `{args.model_name}`"
    print(create_ascii_table(_HEADERS, rows, title))


def main() -> int:
    """Runs the command `accelerate-estimate-memory`."""
    from paceline.compat.accelerate.commands.accelerate_cli import reporting

    return reporting(lambda: estimate_command(estimate_command_parser().parse_args()))
