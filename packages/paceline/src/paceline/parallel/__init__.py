"""One file a strategy, applied in a chain; what serves the same axes lies in one package."""
