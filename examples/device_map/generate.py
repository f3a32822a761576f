"""Generates three times with a GPT-2 of random weights, each time with less of it in memory; the tokens are the same."""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from paceline_large import inference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="the device that has little memory")
    parser.add_argument("--memory", default="22MiB", help="how much it has")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()

    config = GPT2Config(
        n_layer=args.layers, n_embd=args.width, n_head=8, vocab_size=8000, bos_token_id=0, eos_token_id=0
    )

    def build() -> PreTrainedModel:
        return AutoModelForCausalLM.from_config(config)

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        build().save_pretrained(folder)
        rates = inference.measure_rates(args.device, f"{folder}/model.safetensors")
        workload = inference.Workload(batch=1, tokens=8 + args.tokens)
        memory = {args.device: args.memory}
        if args.device != "cpu":
            memory["cpu"] = "8GiB"

        placements = {
            "all in memory": inference.plan(build, folder, placement=args.device, workload=workload, rates=rates),
            "a budget": inference.plan(build, folder, memory=memory, workload=workload, rates=rates),
            "all on the disk": inference.plan(
                build,
                folder,
                placement={"": "disk", "transformer.wpe": args.device},
                workload=workload,
                rates=rates,
            ),
        }
        generated = []
        for name, placement in placements.items():
            model = inference.load(build, folder, placement=placement)
            ids = torch.arange(1, 9, device=args.device)[None]
            start = time.perf_counter()
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.tokens, do_sample=False, pad_token_id=0
            )
            seconds = time.perf_counter() - start
            generated.append(output.tolist())
            print(f"-- {name}: {args.tokens / seconds:.1f} tokens a second")
            print(placement.explain())

    assert generated[0] == generated[1] == generated[2]
    print("the same tokens each time")


if __name__ == "__main__":
    main()
