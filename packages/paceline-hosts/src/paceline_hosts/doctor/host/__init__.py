"""What runs on each host that is examined: it collects facts and measures, and judges nothing."""
