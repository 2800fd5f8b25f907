"""What a forward and a backward leave behind: slots in place of modules, and who records what."""
