"""Big models through accelerate's names, in many small cases; the same file runs under the real library and under ours.

    python record_big_models.py    (the real accelerate) -> recorded_big_models.json

Each case is a function whose result is plain values; an error is its class among those that scripts catch.
"""

import copy
import json
import logging
import os
import tempfile
import warnings

import torch
from accelerate import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate import hooks as H
from accelerate.big_modeling import attach_layerwise_casting_hooks
from accelerate.utils import modeling as M
from accelerate.utils import offload as O
from safetensors.torch import save_file
from torch import nn

CAUGHT = (
    FileNotFoundError,
    KeyError,
    ValueError,
    NotImplementedError,
    RuntimeError,
    AttributeError,
    TypeError,
    OSError,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.BatchNorm1d(4)
        self.c = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
        self.register_buffer("shift", torch.full((3,), 0.5), persistent=False)

    def forward(self, x, extra=None):
        out = self.c(self.b(self.a(x + self.shift)))
        return {"out": out, "extra": extra} if extra is not None else out


class Uncalled(nn.Module):
    """Uses weights of a submodule without calling it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return nn.functional.linear(x, self.inner.weight, self.inner.bias)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.block(self.embed(ids)))


def net(kind=Net):
    torch.manual_seed(0)
    model = kind().eval()
    # Eight values that no initialisation gives.
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.01 * number)
    return model


X = torch.arange(6.0).reshape(2, 3) / 3
IDS = torch.tensor([[1, 2, 6]])


def devices(model):
    return {name: f"{tensor.device} {tensor.dtype}" for name, tensor in M.named_module_tensors(model, recurse=True)}


def hooks(model):
    found = {}
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if hook is not None:
            parts = hook.hooks if isinstance(hook, H.SequentialHook) else [hook]
            found[name] = [
                repr(part) if isinstance(part, H.AlignDevicesHook) else type(part).__name__ for part in parts
            ]
    return found


def outcome(function):
    """Its result, or the class of its error."""
    try:
        return function()
    except Exception as error:
        return "error: " + next((kind.__name__ for kind in CAUGHT if isinstance(error, kind)), "other")


def spread(change, kind=Net, x=X):
    """What a model is like after it was spread, and what it gives; then with its hooks taken off."""
    model = net(kind)
    expected = model(x)
    result = outcome(lambda: change(model))
    report = {"returned": result if isinstance(result, str) else type(result).__name__}
    report |= {"hooks": hooks(model), "devices": devices(model), "map": getattr(model, "hf_device_map", None)}
    report["equal"] = outcome(lambda: torch.equal(model(x), expected))
    report["devices after"] = devices(model)
    report["grad"] = outcome(lambda: model(x).sum().requires_grad)
    report["moved"] = outcome(lambda: type(model.to("cpu")).__name__)
    H.remove_hook_from_submodules(model)
    report["off"] = {"hooks": hooks(model), "devices": devices(model), "forward": "forward" in vars(model)}
    return report


def folder():
    return tempfile.mkdtemp()


# -- sizes and maps ------------------------------------------------------------------------------------------


def sizes():
    model = net()
    special = {"a.weight": torch.float64}
    return {
        "plain": dict(M.compute_module_sizes(model)),
        "half": dict(M.compute_module_sizes(model, dtype="float16")),
        "special": dict(M.compute_module_sizes(model, torch.float16, special)),
        "buffers": dict(M.compute_module_sizes(model, buffers_only=True)),
        "total buffers": M.compute_module_total_buffer_size(model),
        "leaves": M.get_module_leaves(M.compute_module_sizes(model)),
        "maximum": M.calculate_maximum_sizes(model),
        "tied": dict(M.compute_module_sizes(net(Tied))),
        "ties": M.find_tied_parameters(net(Tied)),
        "int4": dict(M.compute_module_sizes(model, dtype=M.CustomDtype.INT4)),
        "bytes": [
            M.dtype_byte_size(each) for each in (torch.bool, torch.float8_e4m3fn, torch.complex64, M.CustomDtype.FP8)
        ],
    }


def size_texts():
    texts = ["5MB", "1MiB", "1.5GB", "1 GB", "1gb", "10", 10, "0GB", "-1GB", -1, 0, "x", "1GIB", "10Kb", "3KB", "2TB"]
    return {repr(text): outcome(lambda text=text: M.convert_file_size_to_int(text)) for text in texts}


def memories():
    given = {"cpu": "2GB", 1: 300, 0: "1KB", "disk": 5}
    result = M.get_max_memory(given)
    model = net()
    return {
        "order": [[str(device), size] for device, size in result.items()],
        "in place": [[str(device), size] for device, size in given.items()],
        "unknown": outcome(lambda: M.get_max_memory({"foo": 1})),
        "text": outcome(lambda: M.get_max_memory({"cpu": "x"})),
        "free": list(M.get_max_memory()),
        "balanced": {str(k): v for k, v in M.get_balanced_memory(model, {0: 900, 1: 900, "cpu": 10}).items()},
        "low": {str(k): v for k, v in M.get_balanced_memory(model, {0: 900, 1: 300, 2: 80}, low_zero=True).items()},
        "one": {str(k): v for k, v in M.get_balanced_memory(model, {0: 900}, low_zero=True).items()},
        "whole": {
            str(k): v for k, v in M.get_balanced_memory(model, {0: 900, 1: 900}, ["Sequential"], torch.float16).items()
        },
    }


def maps():
    results = {}
    memories = [
        {0: 200, 1: 200},
        {0: 400, "cpu": 150},
        {"cpu": 100},
        {"cpu": 1000},
        {0: 100, "cpu": 300, "disk": 9},
        {0: 0},
    ]
    for kind in (Net, Tied):
        for number, memory in enumerate(memories):
            for options in (
                {},
                {"no_split_module_classes": ["Sequential"], "clean_result": False},
                {"dtype": "float16", "offload_buffers": True},
                {"no_split_module_classes": "Sequential", "special_dtypes": {"a.weight": torch.int8}},
            ):
                key = f"{kind.__name__} {number} {sorted(options)}"
                model = net(kind)
                results[key] = outcome(
                    lambda model=model, memory=memory, options=options: dict(
                        infer_auto_device_map(model, dict(memory), **options)
                    )
                )
    plain = nn.Sequential(nn.Linear(100, 1), nn.Linear(50, 1), nn.Linear(10, 1), nn.Linear(5, 1))
    for number, memory in enumerate([{0: 454, 1: 50, "cpu": 3000}, {0: 100, "cpu": 454}, {"cpu": 100}, {0: 0, 1: 700}]):
        results[f"fallback {number}"] = dict(infer_auto_device_map(plain, memory, fallback_allocation=True))
    with init_empty_weights():
        results["meta"] = dict(infer_auto_device_map(Net(), {0: 220, "cpu": 900}))
    return results


def map_checks():
    model = net()
    cases = [{"": "cpu"}, {"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1}, {"a": 0, "b": 1, "c.0": 2}, {}, {"": 0, "zz": 1}]
    cleaned = M.clean_device_map({"c.0": 1, "c.1": 1, "c.2": 1, "a": 0, "b.x": 0, "b.y": 2})
    sizes = {"b": 880, "b.0": 440, "b.1": 440, "a": 100}
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = M.fallback_allocate([("b", block), ("a", nn.Linear(1, 1))], sizes, 500)
    inner = M.fallback_allocate([("b", block)], {"b": 880, "b.0": 440, "b.1": 440}, "500KB")
    none = M.fallback_allocate([("b", block)], {"b": 880, "b.0": 440, "b.1": 440}, 100)
    same = [("cuda", "cuda:0"), ("cuda", "cuda:1"), ("cpu", "cpu:0"), ("cpu", "meta"), ("cpu", "cpu")]
    return {
        "checks": [outcome(lambda case=case: M.check_device_map(model, case)) for case in cases],
        "clean": cleaned,
        "clean all": M.clean_device_map({"a": "cpu", "b": "cpu", "c.d": "cpu"}),
        "fallback": [[place[0], [name for name, _ in place[2]]] for place in (found, inner, none)],
        "same": [M.check_device_same(torch.device(first), torch.device(second)) for first, second in same],
        "config": M.check_tied_parameters_in_config(model),
        "tied devices": outcome(lambda: M.check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0, "b": 1})),
        "tied unknown": outcome(lambda: M.check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0})),
        "with ties": M.get_module_size_with_ties(["b.w"], 10, {"a": 10, "b": 30, "b.w": 4}, [("b", block)])[:2],
        "layers": M.get_max_layer_size(list(model.named_children()), M.compute_module_sizes(model), ["Sequential"]),
    }


# -- single tensors ------------------------------------------------------------------------------------------


def placing():
    results = {}
    for old in (torch.float32, torch.float16, torch.int64, torch.bool):
        for value in (None, torch.float32, torch.bfloat16, torch.int32):
            for dtype in (None, torch.float16, torch.int8):
                for device in ("cpu", "meta"):
                    module = nn.Module()
                    module.register_parameter("p", nn.Parameter(torch.zeros(2).to(old), requires_grad=False))
                    module.register_buffer("b", torch.zeros(2).to(old))
                    given = None if value is None else torch.ones(2).to(value)
                    for name in "pb":
                        key = f"{name} {old} {value} {dtype} {device}"

                        def change(module=module, name=name, device=device, given=given, dtype=dtype):
                            M.set_module_tensor_to_device(module, name, device, value=given, dtype=dtype)
                            tensor = getattr(module, name)
                            values = None if tensor.is_meta else tensor.float().tolist()
                            return [str(tensor.dtype), str(tensor.device), type(tensor).__name__, values]

                        results[key] = outcome(change)
    return results


def placing_faults():
    def put(*args, **kwargs):
        module = nn.Linear(3, 4)
        return outcome(lambda: M.set_module_tensor_to_device(module, *args, **kwargs))

    no_bias = nn.Linear(3, 4, bias=False)
    frozen = nn.Linear(3, 4).requires_grad_(False)
    M.set_module_tensor_to_device(frozen, "weight", "meta")
    empty = nn.Linear(3, 4, device="meta")
    same = nn.Linear(3, 4)
    before = same.weight
    M.set_module_tensor_to_device(same, "weight", "cpu")
    value = torch.ones(4, 3)
    shared = {value.data_ptr(): {}}
    first, second = nn.Linear(3, 4, device="meta"), nn.Linear(3, 4, device="meta")
    for module in (first, second):
        M.set_module_tensor_to_device(module, "weight", "cpu", value=value, tied_params_map=shared)
    return {
        "name": put("nope", "cpu"),
        "module": put("x.weight", "cpu"),
        "shape": put("weight", "cpu", value=torch.ones(2, 2)),
        "broadcast": put("bias", "cpu", value=torch.ones(1, 4)),
        "device": put("weight", "disk"),
        "no accelerator": put("weight", 0),
        "none": outcome(lambda: M.set_module_tensor_to_device(no_bias, "bias", "cpu", value=torch.ones(4))),
        "no value": outcome(lambda: M.set_module_tensor_to_device(empty, "weight", "cpu")),
        "frozen": frozen.weight.requires_grad,
        "same": same.weight is before,
        "shared": first.weight is second.weight,
        "shares memory": first.weight.data_ptr() == value.data_ptr(),
    }


def names():
    outer = nn.Module()
    outer.net = Net()
    outer.register_buffer("q", torch.ones(1), persistent=False)
    tensors = [name for name, _ in M.named_module_tensors(outer.net, recurse=True, remove_non_persistent=True)]
    model = net(Tied)
    broken = net(Tied)
    broken.head.weight = nn.Parameter(torch.zeros(7, 4))
    M.retie_parameters(broken, [["embed.weight", "head.weight"]])
    empty = net(Tied)
    empty.embed.weight = nn.Parameter(torch.empty(7, 4, device="meta"))
    M.retie_parameters(empty, [["embed.weight", "head.weight"]])
    return {
        "non-persistent": sorted(M.get_non_persistent_buffers(outer.net)),
        "recursive": sorted(M.get_non_persistent_buffers(outer, recurse=True)),
        "tensors": tensors,
        "own": [name for name, _ in M.named_module_tensors(outer.net)],
        "parameters": [name for name, _ in M.named_module_tensors(outer.net, include_buffers=False, recurse=True)],
        "ties": M.find_tied_parameters(model),
        "retied": broken.head.weight is broken.embed.weight,
        "retied from meta": [empty.head.weight is empty.embed.weight, empty.embed.weight.is_meta],
        "storage": [M.id_tensor_storage(torch.ones(2))[2], M.id_tensor_storage(torch.ones(2, device="meta"))[1:]],
    }


def empty_weights():
    with init_empty_weights():
        first = Net()
    with init_empty_weights(include_buffers=True):
        second = Net()
    with init_on_device("meta"):
        third = Net()
        frozen = nn.Linear(2, 2).requires_grad_(False)
    after = nn.Linear(2, 2)
    with init_empty_weights():
        tied = Tied()
    return {
        "plain": devices(first), "buffers": devices(second), "on device": devices(third),
        "frozen": frozen.weight.requires_grad, "after": str(after.weight.device),
        "tied": tied.head.weight is tied.embed.weight, "class": type(first.a.weight).__name__,
    }  # fmt: skip


# -- hooks ---------------------------------------------------------------------------------------------------


class AddOne(H.ModelHook):
    def __init__(self, calls):
        self.calls = calls

    def init_hook(self, module):
        self.calls.append("init")
        return module

    def pre_forward(self, module, x, **kwargs):
        self.calls.append(f"pre {sorted(kwargs)}")
        return (x + 1,), kwargs

    def post_forward(self, module, output):
        self.calls.append("post")
        return output + 1

    def detach_hook(self, module):
        self.calls.append("detach")
        return module


class NoGrad(H.ModelHook):
    no_grad = True


def model_hooks():
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    x = torch.ones(1, 1)
    calls, results = [], {}
    H.add_hook_to_module(layer, AddOne(calls))
    results["one"] = layer(x).item()
    H.add_hook_to_module(layer, AddOne(calls))
    results["replaced"] = layer(x).item()
    H.add_hook_to_module(layer, AddOne(calls), append=True)
    results["appended"] = [layer(x).item(), type(layer._hf_hook).__name__, len(layer._hf_hook.hooks)]
    results["name"] = layer.forward.__name__
    results["copied"] = copy.deepcopy(layer)(x).item()
    H.remove_hook_from_module(layer)
    results["removed"] = [layer(x).item(), hasattr(layer, "_hf_hook"), hasattr(layer, "_old_forward")]
    H.add_hook_to_module(layer, NoGrad())
    results["no grad"] = layer(x).requires_grad
    results["calls"] = calls
    nested = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    for module in nested.modules():
        H.add_hook_to_module(module, H.ModelHook(), append=True)
    H.remove_hook_from_module(nested)
    results["left"] = sorted(hooks(nested))
    H.remove_hook_from_module(nested, recurse=True)
    results["left after all"] = sorted(hooks(nested))
    return results


def align_hook():
    results = {}
    for offload in (False, True):
        for buffers in (False, True):
            for inner in (False, True):
                model = net()
                hook = H.AlignDevicesHook(
                    "cpu", offload=offload, offload_buffers=buffers, place_submodules=inner, io_same_device=True
                )
                H.add_hook_to_module(model, hook)
                report = [devices(model), outcome(lambda model=model: torch.equal(model(X), net()(X)))]
                report.append(sorted(hook.weights_map) if hook.weights_map is not None else None)
                H.remove_hook_from_module(model)
                results[f"{offload} {buffers} {inner}"] = [*report, devices(model)]
    meta = nn.Linear(3, 2)
    H.add_hook_to_module(meta, H.AlignDevicesHook("meta", io_same_device=False))
    results["meta"] = [str(meta(X).device), devices(meta)]
    results["fields"] = sorted(set(vars(H.AlignDevicesHook())) - {"tied_pointers_to_remove"})
    skipped = net()
    H.add_hook_to_module(skipped, H.AlignDevicesHook("meta", skip_keys="extra", place_submodules=True))
    out = skipped(X, extra=torch.ones(1))
    results["skipped"] = [str(out["out"].device), str(out["extra"].device)]
    return results


def attached():
    weights = net().state_dict()
    return {
        "align": spread(lambda model: H.attach_align_device_hook(model, "cpu", offload=True)),
        "align placed": spread(lambda model: H.attach_align_device_hook(model, "cpu")),
        "align named": spread(
            lambda model: H.attach_align_device_hook(
                model, "cpu", offload=True, offload_buffers=True, module_name="m",
                weights_map={f"m.{name}": value for name, value in weights.items()},
            )
        ),
        "align preloaded": spread(
            lambda model: H.attach_align_device_hook(
                model, "cpu", offload=True, weights_map=weights, preload_module_classes=["Sequential"], skip_keys=["extra"]
            )
        ),
        "uncalled": spread(lambda model: H.attach_align_device_hook(model, "cpu", offload=True,
                                                                     preload_module_classes=["Uncalled"]), Uncalled),
        "execution": spread(lambda model: H.attach_execution_device_hook(model, "cpu", skip_keys="extra")),
        "execution preloaded": spread(
            lambda model: H.attach_execution_device_hook(model, "cpu", preload_module_classes=["Sequential"])
        ),
        "blocks": spread(
            lambda model: H.attach_align_device_hook_on_blocks(
                model, {"a": "cpu", "b": "cpu", "c": "cpu"}, {"a": True, "b": False, "c": True}, weights_map=weights
            )
        ),
        "blocks and root": spread(
            lambda model: H.attach_align_device_hook_on_blocks(model, {"a": "cpu", "": "cpu"}, {"a": True, "": False})
        ),
        "blocks of one": spread(lambda model: H.attach_align_device_hook_on_blocks(model, "cpu", False)),
        "blocks offloaded": spread(
            lambda model: H.attach_align_device_hook_on_blocks(model, "cpu", True, weights_map=weights)
        ),
        "blocks one device": spread(
            lambda model: H.attach_align_device_hook_on_blocks(
                model, "cpu", {"a": True, "b": False, "c": False}, weights_map=weights
            )
        ),
    }  # fmt: skip


def casting():
    results = {}
    for key, options in {
        "all": {},
        "pattern": {"skip_modules_pattern": ["a"], "skip_modules_classes": (nn.BatchNorm1d,)},
        "text": {"skip_modules_pattern": "c"},
        "class": {"skip_modules_classes": (nn.Sequential,)},
    }.items():
        model = net()
        attach_layerwise_casting_hooks(model, torch.float16, torch.float32, **options)
        results[key] = [hooks(model), devices(model), [round(each, 3) for each in model(X).flatten().tolist()]]
    return results


def cpu_hooks():
    first, second = net(), net()
    first, hook = cpu_offload_with_hook(first, "cpu")
    second, other = cpu_offload_with_hook(second, "cpu", prev_module_hook=hook)
    equal = torch.equal(second(first(X) @ torch.ones(2, 3)), net()(net()(X) @ torch.ones(2, 3)))
    hook.offload()
    kinds = [type(hook).__name__, hooks(first), str(first._hf_hook.execution_device)]
    hook.remove()
    return [equal, *kinds, hooks(first), other.model is second]


# -- spreading models ----------------------------------------------------------------------------------------


def dispatched():
    two = {"a": "cpu", "b": "disk", "c": "cpu"}
    deep = {"a": "disk", "b": "cpu", "c.0": "disk", "c.2": "cpu"}
    return {
        "cpu": spread(lambda model: dispatch_model(model, {"": "cpu"})),
        "each cpu": spread(lambda model: dispatch_model(model, {"a": "cpu", "b": "cpu", "c": "cpu"})),
        "forced": spread(lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True)),
        "disk": spread(lambda model: dispatch_model(model, two, offload_dir=folder())),
        "disk deep": spread(lambda model: dispatch_model(model, deep, offload_dir=folder(), skip_keys="extra")),
        "disk buffers": spread(lambda model: dispatch_model(model, two, offload_dir=folder(), offload_buffers=True)),
        "disk main": spread(lambda model: dispatch_model(model, two, main_device="cpu", offload_dir=folder())),
        "no folder": spread(lambda model: dispatch_model(model, two)),
        "incomplete": spread(lambda model: dispatch_model(model, {"a": "cpu", "b": "disk"}, offload_dir=folder())),
        "meta": spread(lambda model: dispatch_model(model, {"a": "cpu", "b": "meta", "c": "meta"}, main_device="cpu")),
        "meta main": spread(lambda model: dispatch_model(model, {"a": "cpu", "b": "meta", "c": "meta"})),
        "no accelerator": spread(lambda model: dispatch_model(model, {"": 0})),
        "preloaded": spread(
            lambda model: dispatch_model(
                model, {"inner": "disk"}, offload_dir=folder(), preload_module_classes=["Uncalled"], force_hooks=True
            ),
            Uncalled,
        ),
        "tied": spread(
            lambda model: dispatch_model(
                model, {"embed": "disk", "block": "cpu", "head": "disk"}, offload_dir=folder()
            ),
            Tied,
            IDS,
        ),
        "tied apart": spread(
            lambda model: dispatch_model(model, {"embed": "cpu", "block": "disk", "head": "cpu"}, offload_dir=folder()),
            Tied,
            IDS,
        ),
    }


def offloaded():
    return {
        "cpu": spread(cpu_offload),
        "cpu buffers": spread(lambda model: cpu_offload(model, "cpu", offload_buffers=True)),
        "cpu state": spread(lambda model: cpu_offload(model, state_dict=net().state_dict())),
        "cpu preloaded": spread(lambda model: cpu_offload(model, preload_module_classes=["Sequential"])),
        "disk": spread(lambda model: disk_offload(model, folder())),
        "disk buffers": spread(lambda model: disk_offload(model, folder(), offload_buffers=True)),
        "tied": spread(cpu_offload, Tied, IDS),
        "tied disk": spread(lambda model: disk_offload(model, folder()), Tied, IDS),
        "uncalled": spread(lambda model: cpu_offload(model, preload_module_classes=["Uncalled"]), Uncalled),
    }


def offloaded_weights():
    model = net()
    cpu_offload(model)
    whole = M.get_state_dict_offloaded_model(model)
    one = M.get_state_dict_from_offload(model.a, "a.weight", {"a.weight": ""})
    results = {
        "names": list(whole),
        "equal": all(torch.equal(whole[name], value) for name, value in net().state_dict().items()),
        "one": [torch.equal(one["a.weight"], net().a.weight), sorted(one)],
        "offloaded": {name: M.has_offloaded_params(module) for name, module in model.named_modules()},
        "plain": M.has_offloaded_params(nn.Linear(1, 1)),
    }
    with M.align_module_device(model.a):
        results["aligned"] = devices(model)
    results["after"] = devices(model)
    plain = net()
    with M.align_module_device(plain.a, "cpu"):
        results["plain aligned"] = devices(plain)
    results["plain after"] = devices(plain)
    with M.align_module_device(plain.a):
        results["nowhere"] = devices(plain)
    with init_empty_weights():
        empty = Net()
    results["no values"] = outcome(lambda: sorted(M.get_state_dict_offloaded_model(empty)))
    return results


def trained():
    results = {}
    model = net().train()
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(X).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 4))
    results["losses"] = losses
    half = net().train()
    dispatch_model(half, {"a": "disk", "b": "cpu", "c": "cpu"}, offload_dir=folder())
    half(X).sum().backward()
    results["gradients"] = sorted(name for name, parameter in half.named_parameters() if parameter.grad is not None)
    return results


# -- files ---------------------------------------------------------------------------------------------------


def weight_files():
    place = folder()
    index = {}
    tensors = {
        "f": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16) * 1.5, "i": torch.tensor(7),
        "h": torch.ones(2, dtype=torch.float16), "t": torch.tensor([True, False]),
    }  # fmt: skip
    for name, tensor in tensors.items():
        index = O.offload_weight(tensor, name, place, index)
    O.save_offload_index(index, place)
    O.save_offload_index({"later": {"dtype": "float32", "shape": [1]}}, place)
    with open(os.path.join(place, "index.json")) as file:
        saved = json.load(file)
    read = {name: O.load_offloaded_weight(os.path.join(place, f"{name}.dat"), index[name]) for name in tensors}
    save_file({"inner": torch.ones(2)}, os.path.join(place, "x.safetensors"))
    loader = O.OffloadedWeightsLoader(
        state_dict={"s": torch.ones(1), "f": torch.zeros(1)},
        save_folder=place,
        index=saved | {"z": {"safetensors_file": os.path.join(place, "x.safetensors"), "weight_name": "inner",
                             "dtype": "float16"}},
    )  # fmt: skip
    view = O.PrefixedDataset({"a.w": 1, "a.v": 2, "b.w": 3}, "a.")
    model = net()
    weights = {name: value + 1 for name, value in net().state_dict().items()}
    other = folder()
    O.offload_state_dict(other, weights)
    with open(os.path.join(other, "index.json")) as file:
        written = json.load(file)
    M.load_offloaded_weights(model, written, other)
    part = O.extract_submodules_state_dict({"a.w": 1, "a": 2, "ab.w": 3, "b.w": 4}, ["a", "b.w"])
    return {
        "index": saved,
        "files": {name: os.path.getsize(os.path.join(place, name)) for name in sorted(os.listdir(place))},
        "read": {name: [str(value.dtype), value.float().tolist()] for name, value in read.items()},
        "loader": [sorted(loader), len(loader), loader["f"].tolist(), loader["b"].tolist(), loader["z"].tolist()],
        "loader dtype": str(loader["z"].dtype),
        "unknown": outcome(lambda: loader["nope"]),
        "no file": outcome(lambda: loader["later"]),
        "nothing": outcome(O.OffloadedWeightsLoader),
        "empty folder": outcome(lambda: O.OffloadedWeightsLoader(save_folder=folder())),
        "view": [view["w"], list(view), len(view), "w" in view, view.get("nope")],
        "loaded": all(torch.equal(value, weights[name]) for name, value in model.state_dict().items()),
        "part": part,
        "no index": [
            outcome(lambda: O.save_offload_index(None, place)),
            outcome(lambda: O.save_offload_index({}, place)),
        ],
    }


def checkpoints():
    """Folders with one model in several forms."""
    state = net().state_dict()
    place = folder()
    torch.save(state, os.path.join(place, "whole.bin"))
    save_file(state, os.path.join(place, "whole.safetensors"), metadata={"format": "pt"})
    cut = os.path.join(place, "cut")
    os.mkdir(cut)
    names = sorted(state)
    halves = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in halves.items():
        save_file({name: state[name] for name in part}, os.path.join(cut, file), metadata={"format": "pt"})
    table = {name: file for file, part in halves.items() for name in part}
    with open(os.path.join(cut, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": 1}, "weight_map": table}, file)
    bins = os.path.join(place, "bins")
    os.mkdir(bins)
    torch.save(state, os.path.join(bins, "pytorch_model.bin"))
    both = os.path.join(place, "both")
    os.mkdir(both)
    for name in ("a", "b"):
        with open(os.path.join(both, f"{name}.index.json"), "w") as file:
            json.dump({"weight_map": table}, file)
    broken = os.path.join(place, "broken")
    os.mkdir(broken)
    with open(os.path.join(broken, "model.safetensors.index.json"), "w") as file:
        json.dump({"weight_map": table}, file)
    os.mkdir(os.path.join(place, "empty"))
    torch.save({**state, "extra": torch.ones(1)}, os.path.join(place, "more.bin"))
    torch.save({name: value for name, value in state.items() if name != "a.bias"}, os.path.join(place, "less.bin"))
    torch.save({**state, "a.bias": torch.ones(9)}, os.path.join(place, "shape.bin"))
    return place


def loaded(path, start=None, **options):
    """What a model is like after its weights were read."""
    if start == "meta":
        with init_empty_weights():
            model = Net().eval()
    else:
        model = Net().eval()
    result = outcome(lambda: load_checkpoint_in_model(model, path, **options))
    same = {}
    for name, value in net().state_dict().items():
        tensor = model.state_dict()[name]
        same[name] = "meta" if tensor.is_meta else torch.equal(tensor.float(), value.to(tensor.dtype).float())
    return {"returned": result, "devices": devices(model), "same": same}


def loading():
    place = checkpoints()
    cpu = {"": "cpu"}
    mixed = {"a": "cpu", "b": "disk", "c": "cpu"}
    results = {}
    for name in ("whole.bin", "whole.safetensors", "cut", "cut/model.safetensors.index.json", "bins", "both", "broken",
                 "empty", "nowhere", "more.bin", "less.bin", "shape.bin"):  # fmt: skip
        for start in (None, "meta"):
            path = os.path.join(place, name)
            for key, options in {
                "plain": {}, "strict": {"strict": True}, "cpu": {"device_map": cpu},
                "cpu strict": {"device_map": cpu, "strict": True},
                "mixed": {"device_map": mixed, "offload_folder": folder()},
            }.items():  # fmt: skip
                results[f"{name} {start} {key}"] = loaded(path, start, **options)
    path = os.path.join(place, "cut")
    for key, options in {
        "half": {"device_map": cpu, "dtype": torch.float16},
        "half text": {"device_map": cpu, "dtype": "float16"},
        "half without a map": {"dtype": torch.float16},
        "kept": {"device_map": cpu, "dtype": torch.float16, "keep_in_fp32_modules": ["b"]},
        "half disk": {"device_map": mixed, "dtype": torch.bfloat16, "offload_folder": folder()},
        "buffers": {"device_map": mixed, "offload_buffers": True, "offload_folder": folder()},
        "waiting": {"device_map": cpu, "offload_state_dict": True},
        "waiting mixed": {"device_map": mixed, "offload_state_dict": True, "offload_folder": folder()},
        "no folder": {"device_map": mixed},
        "incomplete": {"device_map": {"a": "cpu"}},
        "whole disk": {"device_map": {"": "disk"}, "offload_folder": folder()},
    }.items():
        results[key] = loaded(path, "meta", **options)
        if "offload_folder" in options:
            results[f"{key} files"] = sorted(os.listdir(options["offload_folder"]))
    results["state"] = {
        key: sorted(outcome(lambda path=path, given=given: M.load_state_dict(os.path.join(place, path), given)))
        for key, path, given in (("bin", "whole.bin", None), ("safe", "whole.safetensors", cpu), ("mixed",
                                 "whole.safetensors", mixed))
    }  # fmt: skip
    return results


def loaded_and_dispatched():
    place = checkpoints()
    results = {}
    for key, options in {
        "cpu": {"device_map": {"": "cpu"}},
        "auto": {"device_map": "auto"},
        "sequential": {"device_map": "sequential", "max_memory": {"cpu": 150, "disk": 10**6}, "offload_folder": folder()},
        "mixed": {"device_map": {"a": "disk", "b": "cpu", "c": "cpu"}, "offload_folder": folder()},
        "forced": {"device_map": {"": "cpu"}, "force_hooks": True},
        "half": {"device_map": {"a": "disk", "b": "cpu", "c": "cpu"}, "offload_folder": folder(), "dtype": torch.float64},
        "buffers": {"device_map": {"a": "cpu", "b": "disk", "c": "cpu"}, "offload_folder": folder(),
                    "offload_buffers": True},
        "whole disk": {"device_map": {"a": "disk", "b": "disk", "c": "disk"}, "offload_folder": folder(),
                       "force_hooks": True},
        "none": {},
        "unknown": {"device_map": "best"},
        "strict": {"device_map": {"": "cpu"}, "strict": True},
    }.items():  # fmt: skip
        with init_empty_weights():
            model = Net().eval()
        result = outcome(lambda model=model, options=options: load_checkpoint_and_dispatch(
            model, os.path.join(place, "cut"), **options))  # fmt: skip
        report = [result if isinstance(result, str) else type(result).__name__, devices(model), hooks(model)]
        report.append(getattr(model, "hf_device_map", None) and dict(model.hf_device_map))
        x = X.double() if key == "half" else X
        report.append(outcome(lambda model=model, x=x: torch.allclose(model(x).float(), net()(X), atol=1e-6)))
        results[key] = report
    return results


def folder_of_the_other(place):
    """Reads an offload folder that another library wrote, and gives what the model computes."""
    with init_empty_weights():
        model = Net().eval()
    disk_offload(model, place, execution_device="cpu")
    return [round(each, 5) for each in model(X).flatten().tolist()]


def expected_output():
    """What that model computes."""
    return [round(each, 5) for each in net()(X).flatten().tolist()]


CASES = (
    sizes, size_texts, memories, maps, map_checks, placing, placing_faults, names, empty_weights, model_hooks, align_hook,
    attached, casting, cpu_hooks, dispatched, offloaded, offloaded_weights, trained, weight_files, loading,
    loaded_and_dispatched,
)  # fmt: skip


def main():
    """All cases, by name."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    results = {case.__name__: case() for case in CASES}
    return json.loads(json.dumps(results, default=str))
