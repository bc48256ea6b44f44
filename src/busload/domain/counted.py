"""Numbers of things, for people."""


def counted(count: int, one: str, several: str | None = None) -> str:
    """`1 command`, `1,000 commands`; with the plural of a verb too: `counted(n, "command is", "commands are")`."""
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"
