"""Modules that nobody described: groups read off their traced forwards."""
