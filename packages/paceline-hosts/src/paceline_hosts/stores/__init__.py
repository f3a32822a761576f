"""Stores for checkpoints that many hosts reach: whatever fsspec opens, such as S3."""
