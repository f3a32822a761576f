"""Ranks that hold parts of the same matrices and compute every sample together (`tensor`)."""
