"""What each started process does: it runs the script and reports how it failed."""
