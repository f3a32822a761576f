"""accelerate's commands, which a shell runs as `accelerate ...` and a script calls as functions.

launch              runs `paceline launch` with the same flags and the same config files
config              asks for settings and writes accelerate's own config file
env                 prints what the report of a fault needs
test                runs `paceline test` with a config file
estimate-memory     reads a config or a model folder on this machine; it downloads nothing
merge-weights       calls `merge_fsdp_weights`
to-fsdp2            rewrites a config file from version 1 of FSDP to version 2
tpu-config          runs commands on the hosts of a TPU pod through `gcloud`

A module imports torch inside the functions that need it, because most commands do not.
"""
