"""From captures to norms, factors and sums."""
