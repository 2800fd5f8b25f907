"""Modules described by hand: which axes carry features, and which groups follow."""
