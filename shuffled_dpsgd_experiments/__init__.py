"""The paper's experiments: tasks, tables and figures, each reproducible by one command."""
