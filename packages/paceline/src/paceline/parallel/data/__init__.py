"""Ranks that read different samples: gradients averaged, and what each rank holds divided (`replicate`, `shard`, `zero`)."""
