"""Audits that belong to the paper: its Table 6, the knock-out of the shuffle, repeated runs."""
