"""Commands that look at checkpoints, compare them and remove old ones. A path may be a URL."""
