"""`python -m shuffled_dpsgd` is the command `shuffled-dpsgd`; torchrun starts it with `-m`."""

from __future__ import annotations

from shuffled_dpsgd.cli.main import main

if __name__ == "__main__":
    main()
