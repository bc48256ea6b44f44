"""What a patch may cost."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from busload.settings import PayloadLimits
from busload.troubleshooting.patch import Patch

LIMITS = PayloadLimits()
MEGABYTE = 1024 * 1024
DATA = json.dumps({"a": list(range(200)), "b": {}})
DOUBLE: dict[str, Any] = {"op": "copy", "from": "/b", "path": "/b/x"}


def peak_of(patch: Patch, data: str) -> tuple[str, int]:
    """Why the patch was refused, and how many bytes were in use at most until then"""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"operation|TOO_DEEP") as refused:
            patch.apply(data)
        return str(refused.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_patch_that_doubles_its_data_is_refused_at_the_operation_that_goes_too_far() -> None:
    """All of its copies would take terabytes"""
    doubling = [{"op": "move", "from": "/a", "path": "/b/a"}]
    doubling += [step for _ in range(20) for step in (DOUBLE, {"op": "copy", "from": "/b", "path": "/b/y"})]

    why, peak = peak_of(Patch(doubling, LIMITS), DATA)

    assert "operation 13 (copy): the copies take more than 1,048,576 bytes together" in why
    assert peak < 16 * MEGABYTE, peak


def test_copies_that_are_removed_again_count_as_well() -> None:
    """The data stays small, the work does not"""
    again = [{"op": "copy", "from": "/a", "path": "/b/x"}, {"op": "remove", "path": "/b/x"}] * 500
    data = json.dumps({"a": ["y" * 100] * 1000, "b": {}})

    why, _ = peak_of(Patch(again, LIMITS), data)

    assert "operation 20 (copy)" in why


def test_a_patch_that_nests_deeper_than_data_may_is_refused_before_it_is_copied() -> None:
    deeper = [{"op": "move", "from": "/b", "path": "/c"}, {"op": "add", "path": "/b", "value": {}}]
    deeper += [{"op": "move", "from": "/c", "path": "/b/c"}, {"op": "move", "from": "/b", "path": "/c"}]
    deeper += [{"op": "add", "path": "/b", "value": {}}]
    nest = deeper[:2] + deeper[2:] * 70

    why, _ = peak_of(Patch([*nest, {"op": "copy", "from": "/c", "path": "/d"}], LIMITS), DATA)
    assert why.startswith(f"operation {len(nest)} (copy): TOO_DEEP")
    why, _ = peak_of(Patch(nest, LIMITS), DATA)
    assert why.startswith("TOO_DEEP at /data")


def test_copies_within_the_limit_are_made() -> None:
    patched = json.loads(Patch([DOUBLE, {"op": "copy", "from": "/a", "path": "/b/x/y"}], LIMITS).apply(DATA))
    assert patched == {"a": list(range(200)), "b": {"x": {"y": list(range(200))}}}


def test_the_patch_of_one_command_leaves_nothing_in_the_next() -> None:
    patch = Patch([{"op": "add", "path": "/x", "value": []}, {"op": "copy", "from": "/n", "path": "/x/-"}], LIMITS)
    assert [json.loads(patch.apply(json.dumps({"n": n})))["x"] for n in range(3)] == [[0], [1], [2]]
