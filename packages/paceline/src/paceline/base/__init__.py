"""What every room may use: errors, the environment, logging, the registry. Standard library alone."""
