"""Text from a language model: decoding, and metrics against all references of a prompt.

`decoding.py` continues prompts, greedily or by beam search; `evaluation.py` does so for a held-out
split and scores the result. Each metric is a file of its own and says which variant it is.
"""
