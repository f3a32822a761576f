"""Functions that tests of scripts for DeepSpeed may replace, where other modules of ours call them.

`unittest.mock.patch("deepspeed.module.name")` replaces a function in its own module, and in the modules that stand here. A
test compares the table with the imports of these modules.
"""

# Function, with its module -> the other modules that call it by its name.
REPLACEABLE = {
    "device:get_accelerator": "checkpointing comm surroundings",
    "partition:uniform": "tiling",
    "processes:init_distributed": "initialize zero",
}
