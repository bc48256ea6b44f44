"""One fault planted on purpose: a small change to the package, and the test that must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`text` stands exactly once in `file`, which is a path below src/busload; `test` is a pytest node id."""

    name: str
    file: str
    text: str
    replacement: str
    test: str
    why: str

    def planted(self, source: str) -> str:
        found = source.count(self.text)
        if found != 1:
            raise LookupError(f"{self.name}: its text occurs {found} times in {self.file}, wanted once.")
        return source.replace(self.text, self.replacement)
