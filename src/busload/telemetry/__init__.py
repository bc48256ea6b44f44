"""How a command is followed from outside: spans and metrics of OpenTelemetry, and what log lines say of a command."""
