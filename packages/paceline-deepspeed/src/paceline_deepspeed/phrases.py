"""How errors and warnings name Paceline's calls and settings to a script that is written for DeepSpeed.

`deepspeed.initialize` gives these to `paceline.base.wording`. Each row is a pattern in texts of the whole library, and the
words that work in such a script: its own calls, keys of its config, flags of its launcher. The rows are tried in this order,
and a test holds that no text which such a script can meet names a call that it does not have.
"""

from __future__ import annotations

from paceline.base.wording import Phrases

_INITIALIZE = "engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)"

PHRASES: Phrases = (
    # Whole sentences, whose parts are different calls here.
    (
        r"prepare the copy too: `model, average, optimizer = accelerator\.prepare\([^`]*\)`",
        "give the copy an engine of its own: `copied, *_ = deepspeed.initialize(model=copy, config=config)`",
    ),
    (
        r"save `accelerator\.get_state_dict\(model\)`; or copy",
        "write it with `engine.save_checkpoint(folder)`; or copy",
    ),
    (r"and prepare the copy on all processes", "and give the copy to it on all processes"),
    (r"prepare the copy too", "give the copy an engine of its own"),
    (
        r"let all ranks call `accelerator\.get_state_dict\(model\)`",
        "let all ranks call `engine.module_state_dict()`",
    ),
    (
        r"call `state = accelerator\.get_state_dict\(model\)`, which is whole",
        "call `state = engine.module_state_dict()`, which is whole",
    ),
    (
        r"use what `prepare` returns: `model, optimizer = accelerator\.prepare[^`]*`",
        f"use what it returns: `{_INITIALIZE}`",
    ),
    (r"pass the model that `prepare` returned", "use the engine, and not the model from before `deepspeed.initialize`"),
    (r"with a prepared loader", "with as many batches on each"),
    (r"of a prepared model", "of an engine's model"),
    (r"a prepared model", "the model of an engine"),
    (r"but was not prepared itself", "but is not the engine's"),
    (r"Prepare both before the loop", "Give both to one engine before the loop"),
    (
        r"of an optimizer that was not prepared, so the prepared ones keep theirs",
        "of another optimizer than the engine's, which keeps its own",
    ),
    (
        r"with the optimizer that is prepared, or prepare its optimizer before it",
        "with the optimizer that `deepspeed.initialize` gets",
    ),
    (r"not by a prepared optimizer", "not by the engine's optimizer"),
    (r"of a prepared loader", "of a loader of the engine"),
    # Calls.
    (r"`model, optimizer(?:, loader)? = accelerator\.prepare\([^`]*\)`", f"`{_INITIALIZE}`"),
    (r"`accelerator\.backward`", "`engine.backward`"),
    (r"accelerator\.backward\(", "engine.backward("),
    (r"`accelerator\.clear\(\)`, then `prepare`", "`deepspeed.initialize`"),
    (r"accelerator\.device", "engine.device"),
    (r"`accelerator\.gather\((\w+), with_gradient=True\)`", r"`torch.distributed.nn.functional.all_gather(\1)`"),
    (r"`accelerator\.reduce\((\w+), 'mean'\)`", r"`deepspeed.comm.all_reduce(\1)` divided by the number of processes"),
    (
        r"`gradients = accelerator\.reduce\(gradients, 'mean'\)`",
        "`deepspeed.comm.all_reduce(gradient)` of each, divided by the number of processes",
    ),
    (r"(?<![.\w])`?prepare\(optimizer\)`?", "`deepspeed.initialize`"),
    (r"`prepare`", "`deepspeed.initialize`"),
    (r"`load_state\(folder, strict=False\)`", "`engine.load_checkpoint(folder, load_optimizer_states=False)`"),
    (r"`load_state`", "`engine.load_checkpoint`"),
    (r"`save_state\(\)`", "`engine.save_checkpoint(folder)`"),
    (r"`accelerator\.save_state\(folder\)`", "`engine.save_checkpoint(folder)`"),
    (
        r"gather first, as in `indices, losses = accelerator\.gather_for_metrics\(\(indices, losses\)\)`",
        "gather it first, by `torch.distributed.all_gather_object`",
    ),
    (
        r"write `accelerator\.clip_grad_norm_\(model\.parameters\(\), 1\.0\)`, or call "
        r"`accelerator\.unscale_gradients\(\)` before",
        'let the engine clip them, by `"gradient_clipping": 1.0` in the config',
    ),
    (
        r", after `accelerator\.clip_grad_norm_` if it is to clip",
        '; `"gradient_clipping": 1.0` in the config clips before the step',
    ),
    # Settings.
    (r"plan=\{'zero': 0, 'shard': 1\} without offload", '`"zero_optimization": {"stage": 0}` in the config'),
    (r"plan=\{'shard': n, 'zero': 2\}", '`"zero_optimization": {"stage": 2}` in the config'),
    (r"plan=\{'replicate': 'auto'\}", '`"zero_optimization": {"stage": 0}` in the config'),
    (r"use zero=0 or 1", 'use `"zero_optimization": {"stage": 1}` in the config'),
    (r"zero=([0-3])", r'`"zero_optimization": {"stage": \1}`'),
    (r"mixed_precision='bf16' or 'no'", '`"bf16": {"enabled": true}` in place of fp16'),
    (r"mixed_precision='(bf16|fp16)'", r'`"\1": {"enabled": true}` in the config'),
    (r"shard\.param_dtype=bf16", '`"bf16": {"enabled": true}`'),
    (r"options=\{'(\w+)': \{'(\w+)': '?([\w.*-]+)'?\}\}", r"`PACELINE_OPTIONS='{\1: {\2: \3}}'` in the environment"),
    (r"`--procs ", "`paceline deepspeed --num_gpus "),
)
