"""Draw a permutation and move weights, gradients and optimizer state by it."""
