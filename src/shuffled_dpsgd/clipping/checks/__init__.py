"""What must hold of a model and a batch, and the words of each refusal."""
