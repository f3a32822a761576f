"""Paceline runs the PyTorch training loop that you already have on any number of devices."""

__version__ = "0.1.0"
