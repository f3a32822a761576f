"""accelerate's commands, as functions and as `accelerate ...`; each says how it is done here.

launch              `paceline launch` with the same flags and the same config files
config, env, test   its own config files; what a report of a fault needs; a small run on two processes
estimate-memory     from a config or a model folder on this machine; nothing is downloaded
merge-weights       `merge_fsdp_weights`
to-fsdp2            a config file for version 1 of FSDP, said in the words of version 2
tpu-config          refused, as there are no TPUs here

torch is loaded only by the commands that need it.
"""
