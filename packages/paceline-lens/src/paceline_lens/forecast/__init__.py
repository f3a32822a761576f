"""Memory and time of a run predicted, by a rehearsal of its script."""
