"""Exit codes that mean something between a launcher and its processes."""

# A process was asked to end, and has saved before it ended. A new start continues from there. (EX_TEMPFAIL of sysexits.h)
PREEMPTED = 75

# Ctrl-C ended the process. Shells report a signal as 128 + its number, here that of SIGINT.
INTERRUPTED = 130

# No rank made progress, and `--on-hang leave` (or `restart`, with no restart left) ended the run. (EX_PROTOCOL of sysexits.h)
STUCK = 76

# An anomaly with the action "stop" ended the run. What was saved is whole, and a restart would reach the same step and stop
# again. (EX_DATAERR of sysexits.h)
STOPPED = 65
