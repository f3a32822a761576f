"""What accelerate's DeepSpeedPlugin makes of its arguments, of a config and of the launcher's variables.

Run under the real accelerate and DeepSpeed by `record_deepspeed.py`, and by the tests under the names that we serve.
"""

import copy
import os
import warnings

STAGE3 = {"zero_optimization": {"stage": 3}}
AUTO = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
PLUGINS = {
    "nothing": {},
    "stage 3": {"zero_stage": 3},
    "fields": {"zero_stage": 1, "gradient_clipping": 1.0, "gradient_accumulation_steps": 4,
               "offload_optimizer_device": "cpu"},
    "stage 3, whole": {"zero_stage": 3, "zero3_init_flag": True, "zero3_save_16bit_model": True},
    "init at stage 2": {"zero_stage": 2, "zero3_init_flag": True},
    "config": {"hf_ds_config": STAGE3},
    "config with auto": {"hf_ds_config": AUTO, "gradient_accumulation_steps": 3, "gradient_clipping": 0.5},
    "config against fields": {"hf_ds_config": {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2},
                              "gradient_accumulation_steps": 3, "zero_stage": 1},
    "config without zero": {"hf_ds_config": {"train_micro_batch_size_per_gpu": 1}},
    "no such file": {"hf_ds_config": "nowhere.json"},
}  # fmt: skip
VARIABLES = {
    "from variables": {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true", "ACCELERATE_GRADIENT_CLIPPING": "0.3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
    },
}  # fmt: skip
FIELDS = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "is_train_batch_min",
          "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path",
          "zero3_init_flag", "zero3_save_16bit_model", "transformer_moe_cls_names", "enable_msamp",
          "msamp_opt_level")  # fmt: skip
MIXED = ({}, {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, {"fp16": {"enabled": True}})


def outcome(work):
    """The result of a call as JSON, or the class of its error that both libraries share."""
    try:
        result = work()
    except Exception as error:
        kinds = (NotImplementedError, ValueError, TypeError)
        return "!" + next((kind.__name__ for kind in kinds if isinstance(error, kind)), type(error).__name__)
    return list(result) if isinstance(result, tuple) else result


def plugin_facts(**arguments):
    from accelerate.utils import DeepSpeedPlugin

    with warnings.catch_warnings():  # of a flag that has no effect at stage 2
        warnings.simplefilter("ignore")
        plugin = DeepSpeedPlugin(**copy.deepcopy(arguments))
    return {"config": str(plugin.deepspeed_config), **{name: getattr(plugin, name) for name in FIELDS}}


def config_facts():
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    given = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "fp16": {"enabled": True}}
    config = HfDeepSpeedConfig(given)
    asked = {
        "value": lambda: config.get_value("fp16.enabled"),
        "no value": lambda: [config.get_value("a.b"), config.get_value("a.b", 5)],
        "true": lambda: [config.is_true("fp16.enabled"), config.is_true("bf16.enabled")],
        "false": lambda: [config.is_false("fp16.enabled"), config.is_false("bf16.enabled")],
        "stages": lambda: [config.is_zero2(), config.is_zero3(), config.is_offload()],
        "node": lambda: config.find_config_node("zero_optimization.stage"),
        "no node": lambda: config.find_config_node("a.b"),
        "delete": lambda: [config.del_config_sub_tree("fp16"), config.config, "fp16" in given],
        "delete nothing": lambda: config.del_config_sub_tree("x.y", must_exist=True),
        "a number": lambda: HfDeepSpeedConfig(3),
        "base64": lambda: HfDeepSpeedConfig("eyJhIjogMX0=").config,
    }
    return {name: outcome(work) for name, work in asked.items()}


def filling_facts():
    from accelerate.utils import DeepSpeedPlugin

    given = {
        "zero_optimization": {"stage": 2}, "train_batch_size": "auto", "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "x": 1}}, "list": [{"a": "auto"}],
    }  # fmt: skip
    plugin = DeepSpeedPlugin(hf_ds_config=given)
    both = {"gradient_clipping": 2.0, "optimizer.params.lr": 0.1}
    asked = {
        "fill": lambda: [
            plugin.fill_match("train_batch_size", train_batch_size=8),
            plugin.get_value("train_batch_size"),
        ],
        "filled": lambda: plugin.fill_match("train_batch_size", train_batch_size=9),
        "no value": lambda: plugin.fill_match("optimizer.params.lr"),
        "is auto": lambda: [plugin.is_auto("optimizer.params.lr"), plugin.is_auto("nope")],
        "process without values": lambda: plugin.deepspeed_config_process(must_match=False),
        "process": lambda: plugin.deepspeed_config_process(**both),
        "process, no match": lambda: plugin.deepspeed_config_process(must_match=False, **both),
        "config": lambda: str(plugin.deepspeed_config),
        "select": lambda: plugin.select(),
        "set": lambda: setattr(plugin, "selected", True),
        "selected": lambda: plugin.selected,
    }
    return {name: outcome(work) for name, work in asked.items()}


def precision_facts():
    from accelerate.utils import DeepSpeedPlugin

    facts = {}
    for precision in ("no", "fp16", "bf16", "fp8"):
        for number, more in enumerate(MIXED):
            plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, **copy.deepcopy(more)})

            def work(plugin=plugin, precision=precision):
                plugin.set_mixed_precision(precision)
                return {name: plugin.deepspeed_config[name] for name in ("fp16", "bf16")}

            facts[f"{precision} {number}"] = outcome(work)
    return facts


def run_all():
    facts = {name: outcome(lambda said=said: plugin_facts(**said)) for name, said in PLUGINS.items()}
    for name, variables in VARIABLES.items():
        os.environ.update(variables)
        facts[name] = outcome(plugin_facts)
        for variable in variables:
            del os.environ[variable]
    return {"plugins": facts, "config": config_facts(), "filling": filling_facts(), "precision": precision_facts()}
