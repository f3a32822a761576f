"""One file a command. No torch at import."""
