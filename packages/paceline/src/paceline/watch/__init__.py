"""What a watched run records: its journal, how that travels between hosts, and the registry of runs of a machine."""
