"""What a printed ε rests on, and nothing else.

The files read one after the other as an argument; `docs/trust.md` gives the order. This folder
imports torch, numpy, scipy, dp_accounting and cryptography, and of our own code only `errors`.
Whatever is fast is passed in, and is checked while it runs. Importing `core` loads none of its
files: name the one you want.
"""
