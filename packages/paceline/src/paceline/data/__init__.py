"""Loaders, their order and their position."""
