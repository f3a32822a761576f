"""Optimizers of Paceline's own, and LocalSGD. Scripts import them from `paceline` and `paceline.optim`."""
