"""Data sets by name, from a folder, from official files or from the hub, as checked records."""
