"""What a run must have to go on: its parts as JSON and tensors, and how they are compared with a checkpoint."""
