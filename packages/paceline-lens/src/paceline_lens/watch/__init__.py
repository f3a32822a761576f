"""What is shown of a watched run: the page, lists, the line of progress, metrics. It reads journals, and needs no torch."""
