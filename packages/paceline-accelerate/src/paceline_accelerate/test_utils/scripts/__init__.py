"""Programs that check an installation; each runs on any number of processes and ends with an error where a check fails."""
