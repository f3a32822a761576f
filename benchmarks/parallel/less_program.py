"""One process trains with fewer bits, by one of several libraries; each run prints one line of JSON for `bench_less.py`.

    python less_program.py --what fp8 --by torchao       plain PyTorch and torchao
    python less_program.py --what qlora --by accelerate  accelerate, transformers, peft and bitsandbytes

`paceline` is the same loop natively, `served` the script of accelerate with `paceline.compat`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from parallel.held import Peak, can_measure, held
from parallel.model import gpt, loss_of, tokens

Step = Callable[[Tensor, Tensor], Tensor]


def accelerator_of(by: str, precision: str) -> Any:
    """Returns the object that runs the loop, from the library that is asked for."""
    if by == "paceline":
        from paceline import Accelerator

        return Accelerator(precision, cpu=True)
    if by == "served":
        from paceline.compat import install

        install(["accelerate"])
    from accelerate import Accelerator

    if precision != "fp8":
        return Accelerator(cpu=True, mixed_precision=precision)
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    recipe = AORecipeKwargs(config=Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"))
    return Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])


def prepared(by: str, precision: str, model: nn.Module, optimizer: Any) -> Step:
    """Returns a step of the loop, prepared by a library or (`torchao`) plain."""
    backward = Tensor.backward
    if by != "torchao":
        accelerator = accelerator_of(by, precision)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = model(inputs)
        loss = loss_of(getattr(output, "logits", output).float(), targets)
        backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def fp8(by: str, size: str) -> Step:
    """Linear layers but the head multiply in float8, and the rest computes in bf16."""
    model = gpt(size)
    if by == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        def is_converted(layer: nn.Module, name: str) -> bool:
            return name != "head"

        config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
        convert_to_float8_training(model, config=config, module_filter_fn=is_converted)
    return prepared(by, "fp8", model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def adamw8bit(by: str, size: str) -> Step:
    """States of the optimizer in 8 bits."""
    from torchao.optim import AdamW8bit

    model = gpt(size)
    return prepared(by, "no", model, AdamW8bit(model.parameters(), lr=1e-3))


def qlora(by: str, size: str) -> Step:
    """A Llama with random weights in 4 bits of bitsandbytes, and adapters of peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    width = {"4M": 256, "24M": 512, "tiny": 64}[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8,
    )  # fmt: skip
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits, device_map="cpu")
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return prepared(by, "no", model, torch.optim.AdamW(trained, lr=1e-3))


WHAT = {"fp8": fp8, "adamw8bit": adamw8bit, "qlora": qlora}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=WHAT, required=True)
    parser.add_argument("--by", choices=("paceline", "served", "accelerate", "torchao"), required=True)
    parser.add_argument("--size", default="4M")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # torchao compiles the step of its optimizers; here nobody compiles anything.
    torch.compiler.set_stance("force_eager")
    before = held() if can_measure() else 0
    step = WHAT[options.what](options.by, options.size)
    drawn = tokens(options.rows, options.length, 0) % 1024
    losses: list[float] = []
    cpu: list[float] = []
    seconds: list[float] = []
    for _ in range(options.steps):
        began, cpu_began = time.perf_counter(), time.process_time()
        losses.append(float(step(drawn[:, :-1], drawn[:, 1:])))
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
    rest = peak = 0
    if can_measure():
        rest = held() - before
        with Peak() as most:
            losses.append(float(step(drawn[:, :-1], drawn[:, 1:])))
        peak = most.bytes - before
    row = {"seconds": seconds, "cpu": cpu, "losses": losses, "rest": rest, "peak": peak}
    os.write(1, f"RESULT {json.dumps(row)}\n".encode())


if __name__ == "__main__":
    main()
