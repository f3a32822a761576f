"""accelerate's names."""
