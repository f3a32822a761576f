"""Which launchers take part in a run: rounds, leadership and messages, without sockets or clocks."""
