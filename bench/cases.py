"""Everything that can be measured."""

from __future__ import annotations

from bench import beside, limits, ours, variants

ALL = [*limits.CASES, *ours.CASES, *variants.CASES, *beside.CASES]
