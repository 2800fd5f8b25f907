"""Data sets by name, from a folder, from official files or from the hub, as checked records.

`loading.py` takes the `[data]` section of a run and returns its splits: `read_texts`,
`read_continuations`, `read_images`, and `read_references` with every reference of each prompt of
a test set. `published.py` has the facts of each named set: classes, files, hub name, licence.
"""
