"""One module per noun: its routes, what they read, and what they do."""
