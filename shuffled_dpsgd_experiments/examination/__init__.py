"""The paper's theorem on its own worst-case pair: its claim for a step, and the truth."""
