"""What a watched run records, and what is shown of it: one format, one reader, no torch."""
