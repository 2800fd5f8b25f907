"""Launching the same work again: recordings of settling, and captures in stable places."""
