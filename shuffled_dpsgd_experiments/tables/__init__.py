"""The paper's tables: what it printed, what was run here, and what is proven of that."""
