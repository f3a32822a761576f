"""One process that trains with less memory, by one of several libraries; it takes a step each time `bench_less.py` asks.

    python less_program.py --what fp8 --by torchao       plain PyTorch and torchao
    python less_program.py --what qlora --by accelerate  accelerate, transformers, peft and bitsandbytes

Each line of the input (`step` or `memory`) is answered by one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from parallel.held import Peak, held
from parallel.model import GPT, loss_of, tokens

Step = Callable[[Tensor, Tensor], Tensor]


def gpt(width: int, device: str = "cpu") -> nn.Module:
    """The same model by every library: 4 blocks."""
    torch.manual_seed(0)
    return GPT(layers=4, width=width, vocabulary=1024).to(device)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def loop(model: nn.Module, optimizer: Any, backward: Callable[[Tensor], Any] = Tensor.backward) -> Step:
    """The loop that all of them run, but DeepSpeed."""

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = model(inputs)
        loss = loss_of(getattr(output, "logits", output).float(), targets)
        backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def paceline(
    model: nn.Module, optimizer: Any, precision: str = "no", options: Any = None, device: str = "cpu", **plan: Any
) -> Step:
    from paceline import Accelerator

    accelerator = Accelerator(precision, plan=plan, options=options, cpu=device == "cpu")
    model, optimizer = accelerator.prepare(model, optimizer)
    return loop(model, optimizer, accelerator.backward)


def accelerate(model: nn.Module, optimizer: Any, precision: str = "no", handlers: Any = None) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=handlers)
    model, optimizer = accelerator.prepare(model, optimizer)
    return loop(model, optimizer, accelerator.backward)


def is_converted(layer: nn.Module, name: str) -> bool:
    return name != "head"


def fp8(by: str, width: int) -> Step:
    """Linear layers but the head multiply in float8, with a scale for each row; everything else in float32."""
    model = gpt(width)
    if by == "paceline":
        return paceline(model, adamw(model.parameters()), "fp8")

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    convert_to_float8_training(model, config=config, module_filter_fn=is_converted)
    return loop(model, adamw(model.parameters()))


def fp8_bf16(by: str, width: int) -> Step:
    """What accelerate does unless it is told otherwise: a scale for each tensor, and everything else in bf16."""
    model = gpt(width)
    if by == "paceline":
        options = {"fp8": {"recipe": "tensorwise", "dtype": "bf16"}}
        return paceline(model, adamw(model.parameters()), "fp8", options)

    from accelerate.utils import AORecipeKwargs

    # Its default wraps weights for FSDP2; without FSDP2 an optimizer that was made before `prepare` then lacks them.
    recipe = AORecipeKwargs(enable_fsdp_float8_all_gather=False, module_filter_func=is_converted)
    return accelerate(model, adamw(model.parameters()), "fp8", [recipe])


def adamw8bit(by: str, width: int) -> Step:
    """States of the optimizer in 8 bits."""
    model = gpt(width)
    if by == "paceline":
        from paceline.optim import adamw8bit as ours

        return paceline(model, ours(model.parameters(), lr=1e-3))

    from torchao.optim import AdamW8bit

    # As torch's AdamW and Paceline's name for it, which decay by 0.01.
    return loop(model, AdamW8bit(model.parameters(), lr=1e-3, weight_decay=0.01))


def qlora(by: str, width: int) -> Step:
    """A Llama with random weights in 4 bits of bitsandbytes, and adapters of peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits, device_map="cpu")
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.train()  # `from_pretrained` gives it for evaluation, where bitsandbytes packs weights and loses gradients
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (paceline if by == "paceline" else accelerate)(model, adamw(trained))


def disk(by: str, width: int, folder: str) -> Step:
    """States of the optimizer in files."""
    model = gpt(width)
    files = tempfile.mkdtemp(dir=folder)
    if by == "paceline":
        return paceline(model, adamw(model.parameters()), offload=f"optimizer=disk:{files}")

    import deepspeed

    most = max(parameter.numel() for parameter in model.parameters())
    on_disk = {"device": "nvme", "nvme_path": files, "pin_memory": False, "buffer_count": 12}
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": most,
            "reduce_bucket_size": most,  # 500 million elements, 1.9 GiB, unless it is said
            "offload_optimizer": {**on_disk, "pipeline_read": True, "pipeline_write": True},
        },
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(engine(inputs).float(), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def activations(by: str, width: int) -> Step:
    """What the backward pass needs waits in the memory of the host; on the simulated device."""
    model = gpt(width, "sim")
    optimizer = adamw(model.parameters())
    if by == "paceline":
        return paceline(model, optimizer, device="sim", offload="activations")

    plain = loop(model, optimizer)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return plain(inputs, targets)

    return step


WHAT = {
    "fp8": fp8,
    "fp8-bf16": fp8_bf16,
    "adamw8bit": adamw8bit,
    "qlora": qlora,
    "disk": disk,
    "activations": activations,
}


def most_held(step: Callable[[], object], device: str) -> tuple[int, int]:
    """Bytes after a step and, at its peak, within it."""
    if device == "cpu":
        with Peak() as peak:
            step()
        gc.collect()
        return held(), peak.bytes
    torch.accelerator.reset_peak_memory_stats()
    step()
    return held(device), torch.accelerator.max_memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=WHAT, required=True)
    parser.add_argument("--by", required=True)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print what they like
    torch.set_num_threads(1)
    torch.compiler.set_stance(
        "force_eager"
    )  # torchao compiles the step of its optimizers; here nobody compiles anything
    device = "sim" if options.what == "activations" else "cpu"
    arguments = (options.folder,) if options.what == "disk" else ()
    drawn = tokens(options.rows, options.length, 0).to(device)

    def made(width: int) -> Callable[[], float]:
        step = WHAT[options.what](options.by, width, *arguments)
        return lambda: step(drawn[:, :-1], drawn[:, 1:]).item()

    made(32)()  # all is imported, and libraries have their work space
    gc.collect()
    before = held(device)
    step = made(options.width)
    for line in sys.stdin:
        if line == "memory\n":
            rest, peak = most_held(step, device)
            print(json.dumps({"rest": rest - before, "peak": peak - before}), file=answers)
            continue
        began, cpu_began = time.perf_counter(), time.process_time()
        loss = step()
        row = {"loss": loss, "cpu": time.process_time() - cpu_began, "seconds": time.perf_counter() - began}
        print(json.dumps(row), file=answers)


if __name__ == "__main__":
    main()
