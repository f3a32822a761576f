"""The launcher of this host. Those of other hosts are entry points of other distributions."""
