"""Which function runs which type of command: the registry, and classes whose methods are handlers."""
