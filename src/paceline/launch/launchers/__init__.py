"""One file or package for each launcher; the registry finds those that define `LAUNCHER`."""
