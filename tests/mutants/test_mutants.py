"""The list of mutants cannot rot: what they change is there, and so is the test that must notice."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted_and_its_test_exists(mutant: Mutant) -> None:
    source = (ROOT / "src/busload" / mutant.file).read_text()
    assert mutant.planted(source) != source
    path, _, name = mutant.test.partition("::")
    functions = [
        node.name
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert functions.count(name.partition("[")[0]) == 1


def test_every_mutant_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 16


def test_a_mutant_whose_text_is_gone_is_said_to_be_so() -> None:
    with pytest.raises(LookupError, match="occurs 0 times"):
        MUTANTS[0].planted("something else")
