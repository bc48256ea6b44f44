"""Everything that can be measured."""

from __future__ import annotations

from bench import beside, buffers, dispatch, fairness, identity, limits, ours, variants

ALL = [
    *limits.CASES,
    *ours.CASES,
    *variants.CASES,
    *identity.CASES,
    *fairness.CASES,
    *buffers.CASES,
    *dispatch.CASES,
    *beside.CASES,
]
