"""Speed and memory of one training step, this library beside its peers."""
