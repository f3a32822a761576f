"""Starting processes and looking after them. No torch at import."""
