"""Everything that can be measured."""

from __future__ import annotations

from bench import (
    beside,
    buffers,
    connections,
    dispatch,
    fairness,
    identity,
    limits,
    ours,
    torture,
    traced,
    variants,
    wake,
    watched,
)

ALL = [
    *limits.CASES,
    *ours.CASES,
    *variants.CASES,
    *watched.CASES,
    *wake.CASES,
    *traced.CASES,
    *identity.CASES,
    *connections.CASES,
    *fairness.CASES,
    *buffers.CASES,
    *dispatch.CASES,
    *beside.CASES,
    *torture.CASES,
]
