"""One file or package for each launcher; an entry point of `paceline.launchers` names its `LAUNCHER`."""
