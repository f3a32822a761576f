"""What is said of checkpoints: which there are, what is in one, and how two differ."""
