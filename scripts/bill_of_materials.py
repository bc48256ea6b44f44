"""The software bill of materials: what is installed with busload, in the format of CycloneDX.

python scripts/bill_of_materials.py SITE_PACKAGES busload > busload.cdx.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def bill_of_materials(roots: Sequence[str], site: str) -> dict[str, Any]:
    """Everything that these requirements, such as `busload[redis]`, have brought into a folder of packages.

    The first one is the subject. It holds no time and no random number: the same packages give the same bill.
    """
    return _Bill(site).of(roots)


class _Bill:
    def __init__(self, site: str) -> None:
        self._site = site

    def of(self, roots: Sequence[str]) -> dict[str, Any]:
        edges: dict[str, set[str]] = {}
        for root in roots:
            self._follow(Requirement(root), edges, set())
        subject = canonicalize_name(Requirement(roots[0]).name)
        return {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": self._component(subject)},
            "components": [self._component(name) for name in sorted(edges) if name != subject],
            "dependencies": [
                {"ref": self._purl(name), "dependsOn": sorted(map(self._purl, edges[name]))} for name in sorted(edges)
            ],
        }

    def _follow(self, requirement: Requirement, edges: dict[str, set[str]], seen: set[tuple[str, str]]) -> None:
        name = canonicalize_name(requirement.name)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needs = edges.setdefault(name, set())
            for text in self._found(name).requires or ():
                needed = Requirement(text)
                if needed.marker is None:
                    wanted = extra == ""
                else:
                    wanted = needed.marker.evaluate({"extra": extra}) and (
                        extra == "" or not needed.marker.evaluate({"extra": ""})
                    )
                if not wanted:
                    continue
                if canonicalize_name(needed.name) != name:
                    needs.add(canonicalize_name(needed.name))
                self._follow(needed, edges, seen)

    def _component(self, name: str) -> dict[str, Any]:
        found = self._found(name)
        metadata = found.metadata
        classifiers = [one for one in metadata.get_all("Classifier") or () if one.startswith("License ::")]
        if "License-Expression" in metadata:
            licenses: list[dict[str, Any]] = [{"expression": metadata["License-Expression"]}]
        elif classifiers:
            licenses = [{"license": {"name": one.rpartition(" :: ")[2]}} for one in classifiers]
        else:
            first = (metadata.get_all("License") or [""])[0].strip().partition("\n")[0]
            licenses = [{"license": {"name": first}}] if first else []
        return {
            "type": "library",
            "bom-ref": self._purl(name),
            "name": name,
            "version": found.version,
            "purl": self._purl(name),
            "licenses": licenses,
        }

    def _purl(self, name: str) -> str:
        return f"pkg:pypi/{name}@{self._found(name).version}"

    def _found(self, name: str) -> Distribution:
        context = DistributionFinder.Context(name=name, path=[self._site])
        for found in MetadataPathFinder.find_distributions(context):
            return found
        sys.exit(f"{name} is needed and not installed in {self._site}, so the bill would lack it.")


if __name__ == "__main__":
    print(json.dumps(bill_of_materials(sys.argv[2:], sys.argv[1]), indent=2))
