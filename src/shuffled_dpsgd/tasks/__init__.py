"""Tasks to train on: the digits default, and image, text and language-model tasks from TOML."""
