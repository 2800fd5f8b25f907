"""What several rooms need to know about PyTorch and the objects it makes."""
