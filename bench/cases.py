"""Everything that can be measured."""

from __future__ import annotations

from bench import beside, buffers, dispatch, identity, limits, ours, turns, variants

ALL = [
    *limits.CASES,
    *ours.CASES,
    *variants.CASES,
    *turns.CASES,
    *identity.CASES,
    *buffers.CASES,
    *dispatch.CASES,
    *beside.CASES,
]
