"""One file for each way of being started: `DETECT(env) -> World | None`."""
