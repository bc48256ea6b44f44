"""Who meets whom in the schedules of every run, and in how many."""

from __future__ import annotations

CASTS = {
    "workers": ("sender", "worker 1", "worker 2", "sweeper"),
    "operators": ("sender", "worker 1", "sweeper", "operator 1", "operator 2"),
    "strangers": ("sender", "worker 1", "worker 2", "sweeper", "stranger"),
    "relays": ("sender", "worker 1", "worker 2", "relay 1", "relay 2", "operator 1"),
    "senders": ("sender 1", "sender 2", "worker 1", "pruner"),
}
EVERYBODY = (
    "sender",
    "worker 1",
    "worker 2",
    "worker 3",
    "sweeper",
    "operator 1",
    "operator 2",
    "relay 1",
    "relay 2",
    "pruner",
    "stranger",
)
