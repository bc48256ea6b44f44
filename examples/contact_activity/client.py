"""What an application needs of the marketing service: one bulk call, and what its answers mean for each item."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid5

from busload import Group, PermanentCommandError, RateLimitedError, TransientCommandError
from examples.contact_activity.service import MarketingService

URL, TIMEOUT = "MARKETING_URL", 10


@contextmanager
def marketing_service() -> Generator[None]:
    """The service that MARKETING_URL names, else one of our own."""
    if URL in os.environ:
        yield
    else:
        with MarketingService(calls_per_second=5) as service:
            os.environ[URL] = service.url
            yield


def push(group: Group, kind: str, records: Sequence[dict[str, Any]]) -> None:
    """Send one record for each item, in their order, and judge the items by the answers.

    What is sent again has the ids it had before, so that the service can recognise it. The key of the whole call is
    made of the group and of what is left in it: the same items, the same key.
    """
    key = uuid5(group.group_id, ",".join(str(item.id) for item in group))
    answers = _post(f"{os.environ[URL]}/{kind}/bulk", records, key=str(key))
    for item, answer in zip(group, answers, strict=True):
        if answer["status"] < 300:
            group.succeed(item)
        else:
            group.fail(item, PermanentCommandError(answer["error"], code=str(answer["status"])))


def _post(url: str, records: Sequence[dict[str, Any]], *, key: str) -> list[dict[str, Any]]:
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    request = urllib.request.Request(url, json.dumps(records).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            answers: list[dict[str, Any]] = json.load(response)["records"]
            return answers
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 429:
                raise RateLimitedError(after=float(error.headers["Retry-After"])) from None
            raise TransientCommandError(f"The service answered {error.code}.", code=str(error.code)) from None
