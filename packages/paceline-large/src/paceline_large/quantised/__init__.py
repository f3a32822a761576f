"""Weights that bitsandbytes or torchao keep in few bits."""
