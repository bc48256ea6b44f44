"""Everything that can be measured."""

from __future__ import annotations

from bench import beside, identity, limits, ours, variants

ALL = [*limits.CASES, *ours.CASES, *variants.CASES, *identity.CASES, *beside.CASES]
