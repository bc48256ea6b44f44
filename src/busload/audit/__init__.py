"""What operators did: to commands, batches, jobs, domains, limits, buffers, workers and the outbox."""

from busload.audit.actions import Action, ActionPage, ActionType

__all__ = ["Action", "ActionPage", "ActionType"]
