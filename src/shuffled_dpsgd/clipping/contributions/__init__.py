"""Per-sample gradients described without being stored, and what each way to their norm costs."""
