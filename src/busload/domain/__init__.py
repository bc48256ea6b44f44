"""What our words mean: no I/O, and nothing else of ours but the errors."""
