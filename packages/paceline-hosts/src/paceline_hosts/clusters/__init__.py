"""Settings that belong to one launcher alone: a file for each launcher that has any (`paceline.config.clusters`)."""
