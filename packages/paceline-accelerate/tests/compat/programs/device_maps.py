"""transformers' models by device maps, on the names that accelerate has: `everything()` gives what each way came to."""

import tempfile
import warnings

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

IDS = torch.tensor([[1, 5, 9]])


def everything():
    """Way of loading -> whether outputs, generated words and a saved copy are right; the map; tensors on meta."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=101, n_positions=64, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config).eval()
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder, max_shard_size="30KB")
    logits = model(IDS).logits
    words = model.generate(IDS, max_new_tokens=5, do_sample=False)
    parts = ["wte", "wpe", "h.0", "h.1", "h.2", "ln_f"]
    spread = {f"transformer.{part}": "disk" if part in ("h.1", "h.2") else "cpu" for part in parts} | {"lm_head": "cpu"}
    half = sum(parameter.nbytes for parameter in model.parameters()) // 2
    ways = {
        "cpu": {"device_map": "cpu"},
        "auto": {"device_map": "auto"},
        "auto with little memory": {"device_map": "auto", "max_memory": {"cpu": half}},
        "spread": {"device_map": spread},
        "low memory": {"low_cpu_mem_usage": True},
    }
    results = {}
    for name, options in ways.items():
        loaded = AutoModelForCausalLM.from_pretrained(folder, offload_folder=tempfile.mkdtemp(), **options).eval()
        saved = tempfile.mkdtemp()
        right = [
            torch.allclose(loaded(IDS).logits, logits, atol=1e-5),
            torch.equal(loaded.generate(IDS, max_new_tokens=5, do_sample=False), words),
        ]
        loaded.save_pretrained(saved, max_shard_size="30KB")
        again = AutoModelForCausalLM.from_pretrained(saved).eval()
        right.append(torch.allclose(again(IDS).logits, logits, atol=1e-5))
        device_map = {module: str(device) for module, device in getattr(loaded, "hf_device_map", {}).items()}
        results[name] = [right, device_map, sum(parameter.is_meta for parameter in loaded.parameters())]
    return results
