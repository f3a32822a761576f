"""The private names of torch that this part alone uses, one function each; see `paceline.torch_internals`."""
