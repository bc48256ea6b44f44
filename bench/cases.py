"""Everything that can be measured."""

from __future__ import annotations

from bench import beside, buffers, dispatch, fairness, identity, limits, ours, variants, watched

ALL = [
    *limits.CASES,
    *ours.CASES,
    *variants.CASES,
    *watched.CASES,
    *identity.CASES,
    *fairness.CASES,
    *buffers.CASES,
    *dispatch.CASES,
    *beside.CASES,
]
