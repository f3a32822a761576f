"""One file for each launcher whose variables are read. `World.detect` calls the `DETECT(env) -> World | None` of each."""
