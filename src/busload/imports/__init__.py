"""Tasks that wait in another queue, taken over as commands."""

from busload.imports.take_over import Report, Skipped, Source, WaitingTask, take_over

__all__ = ["Report", "Skipped", "Source", "WaitingTask", "take_over"]
