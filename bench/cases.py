"""Everything that can be measured."""

from __future__ import annotations

from bench import limits, ours, peers

ALL = [*limits.CASES, *ours.CASES, *peers.CASES]
