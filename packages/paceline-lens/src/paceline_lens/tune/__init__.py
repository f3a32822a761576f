"""The search for the plan that trains fastest, by trials of the script itself."""
