"""Public pre-training for the private runs: a language model and a vision Transformer.

Nothing here is private, and nothing here sees the set that is private later. Both programs need
torch, transformers and numpy alone, and write a checkpoint beside a JSON that says what it is.
"""
