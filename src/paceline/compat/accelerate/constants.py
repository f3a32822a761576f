"""accelerate's constants: names of files, and words that its settings know."""

MODEL_NAME, SAFE_MODEL_NAME, OPTIMIZER_NAME = "pytorch_model", "model", "optimizer"
SCHEDULER_NAME, SAMPLER_NAME, RNG_STATE_NAME = "scheduler", "sampler", "random_states"
SCALER_NAME = "scaler.pt"
WEIGHTS_NAME, SAFE_WEIGHTS_NAME = "pytorch_model.bin", "model.safetensors"
WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json", "model.safetensors.index.json"
FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
