"""`accelerate config`: accelerate's config files, written and read."""
