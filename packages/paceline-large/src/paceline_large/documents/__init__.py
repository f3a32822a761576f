"""Batches by a number of tokens, and packed documents. Scripts import the names from `paceline`."""
