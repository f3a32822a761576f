"""Memory and time predicted before a run."""
