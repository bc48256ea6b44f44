"""How a command is followed from outside: spans and metrics of OpenTelemetry, and what log lines say of a command."""

from busload.telemetry.logs import CommandFields, JsonLines

__all__ = [
    "CommandFields",
    "JsonLines",
]
