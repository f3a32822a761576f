"""The strategy `offload`: states of optimizers, parameters and activations in host memory, or states on disk."""
