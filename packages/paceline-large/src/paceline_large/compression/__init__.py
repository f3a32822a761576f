"""Gradients that are sent in fewer bytes."""
