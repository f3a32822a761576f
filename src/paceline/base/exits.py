"""Exit codes that mean something between a launcher and its processes."""

# A process that was asked to end has saved and ended: start it again and it goes on. (EX_TEMPFAIL of sysexits.h)
PREEMPTED = 75

# Ctrl-C, as a shell counts it: 128 + the number of SIGINT.
INTERRUPTED = 130

# No rank made progress, and `--on-hang leave` (or `restart`, with no restart left) ended the run. (EX_PROTOCOL of sysexits.h)
STUCK = 76

# An anomaly with the action "stop": what has saved is whole, and beginning again would come to the same step. (EX_DATAERR)
STOPPED = 65
