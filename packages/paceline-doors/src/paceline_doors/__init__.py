"""How the names of another library are served, which the parts for accelerate and DeepSpeed have in common.

All that concerns one library lies in a part of its own, which is found by entry points:

    paceline.libraries            the table of its names          `Names` in paceline_doors.names
    paceline.config_dialects      its flags, variables and files  paceline.config.dialects
    paceline.script_libraries     what scripts need at a launch   paceline.launch.script_libraries
    paceline.script_configs       configs that scripts bring      read by `paceline tune`
    paceline.checkpoint_formats   folders that it has written     paceline.checkpoint.format.checkpoint_format

Every command imports the dialects, so none of them imports torch, or what serves the names.

What such a part may use of the core, by public names alone (`tests/shape/test_doors.py`):

    Accelerator                  subclassed, or owned by an engine; also its run, and what that has prepared
    config                       Given, ConfigDialect, resolve_run: words of the library become settings with their places
    checkpoint                   stores, files of weights, formats: what `save_state` and `load_state` are made of
    data, optim, precision       prepared loaders, optimizers and schedulers; the scaler
    parallel                     stages and micro-batches of a pipeline; parts of divided parameters
    observe                      profiles and trackers
    world                        World, collectives, rendezvous; whole values of divided tensors
"""
