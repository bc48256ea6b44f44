"""Numbers and durations, for people."""

from datetime import timedelta


def counted(count: int, one: str, several: str | None = None) -> str:
    """`1 command`, `1,000 commands`; with the plural of a verb too: `counted(n, "command is", "commands are")`."""
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"


def per_second(rate: float, one: str) -> str:
    """`1 call a second`, `0.5 calls a second`."""
    figure = f"{rate:,.3g}"
    return f"{figure} {one}{'' if figure == '1' else 's'} a second"


def span(duration: timedelta) -> str:
    """A duration as people say it, in its largest unit: `2 h`, `90 s`, `0.2 s`."""
    seconds = max(duration.total_seconds(), 0.0)
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.001 else "0 s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
