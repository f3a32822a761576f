"""The release of this package, and the releases of torch that it was tested with (`make test-torch`)."""

VERSION = "0.1.0"

# Oldest and newest, both included; `pyproject.toml` says the same, and a test compares them.
TORCH_OLDEST = (2, 11)
TORCH_NEWEST = (2, 15)
