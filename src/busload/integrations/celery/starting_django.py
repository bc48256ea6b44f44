"""Tasks of a Django project, imported while Django starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_starting_django_again(app: Any) -> Iterator[None]:
    """Import modules with tasks within `ready()` of a Django app, where Celery's fixup would call `django.setup()`.

    The models are loaded then, which is all that tasks need. Django runs its checks itself after it has started.
    """
    if not _django_starts():
        yield
        return
    from celery.fixups.django import DjangoFixup, DjangoWorkerFixup

    class Started(DjangoWorkerFixup):
        def validate_models(self) -> None:
            """`ready()` is called by `django.setup()`, which refuses to be called again."""

    fixups = [one for one in app._fixups if isinstance(one, DjangoFixup)]
    kept = [one.worker_fixup for one in fixups]
    for one in fixups:
        one.worker_fixup = Started(app)
    try:
        yield
    finally:
        for one, before in zip(fixups, kept, strict=True):
            one.worker_fixup = before


def _django_starts() -> bool:
    registry = sys.modules.get("django.apps")
    return registry is not None and registry.apps.loading and not registry.apps.ready
