"""Products of matrices in float8: the precision, the strategy that chooses layers, and what torchao computes."""
