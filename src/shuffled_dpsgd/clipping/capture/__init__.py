"""What a forward and a backward leave behind: slots in place of modules, captures, the recorder."""
