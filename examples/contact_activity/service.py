"""A marketing service with a bulk endpoint, a rate limit, and records that it cannot take. Start it by itself:

    python -m examples.contact_activity.service --port 8025 --calls-per-second 5

`POST /activities/bulk` takes up to 1,000 records, each with an `id`, and answers for each: 201 taken, 200 known before,
422 for a record with `<script>` in it. With `--strict` such a record fails the whole call with 500 instead. Too many
calls are answered by 429 with `Retry-After`. `GET /ledger` tells what has arrived.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self, TypeGuard

MOST_RECORDS = 1000
POISON = "<script>"


@dataclass
class Ledger:
    """What a service remembers: how often each record was taken, and every idempotency key of a call that passed."""

    taken: Counter[str] = field(default_factory=Counter)
    records: dict[str, Any] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    answers: Counter[int] = field(default_factory=Counter)
    """How many calls were answered by which status."""


class MarketingService:
    """Listens on loopback, in threads, for as long as its `with` block runs. It refuses the first `busy` calls."""

    def __init__(
        self, *, port: int = 0, calls_per_second: int | None = None, busy: int = 0, strict: bool = False
    ) -> None:
        self.ledger = Ledger()
        self._limit, self._busy, self._strict = calls_per_second, busy, strict
        self._lock = threading.Lock()
        self._recent: deque[float] = deque()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), type("Endpoint", (_Endpoint,), {"service": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait(self) -> None:
        self._thread.join()

    def answer(self, path: str, key: str, records: Any) -> tuple[int, Any]:
        """The status and the body for one call."""
        with self._lock:
            status, body = self._judge(path, key, records)
            self.ledger.answers[status] += 1
        return status, body

    def _judge(self, path: str, key: str, records: Any) -> tuple[int, Any]:
        if not self._within_limit():
            return 429, {"error": "Too many calls."}
        if not _are_records(records):
            return 400, {"error": "Send a list of records, each with an id."}
        if len(records) > MOST_RECORDS:
            return 413, {"error": f"Send at most {MOST_RECORDS} records."}
        kind = path.strip("/").removesuffix("/bulk")
        if self._strict and any(map(_is_poison, records)):
            return 500, {"error": "Internal server error."}
        self.ledger.keys.append(key)
        return 207, {"records": [self._take(kind, record) for record in records]}

    def _take(self, kind: str, record: dict[str, Any]) -> dict[str, Any]:
        if _is_poison(record):
            return {"id": record["id"], "status": 422, "error": "comment: not allowed"}
        name = f"{kind}/{record['id']}"
        self.ledger.taken[name] += 1
        self.ledger.records[name] = record
        return {"id": record["id"], "status": 201 if self.ledger.taken[name] == 1 else 200}

    def _within_limit(self) -> bool:
        if self._busy > 0:
            self._busy -= 1
            return False
        now = time.monotonic()
        while self._recent and self._recent[0] <= now - 1:
            self._recent.popleft()
        if self._limit is not None and len(self._recent) >= self._limit:
            return False
        self._recent.append(now)
        return True


def _are_records(records: list[Any] | dict[str, Any] | str | float | None) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(records, list) and all(isinstance(one, dict) and "id" in one for one in records)


def _is_poison(record: dict[str, Any]) -> bool:
    return any(POISON in value for value in record.values() if isinstance(value, str))


class _Endpoint(BaseHTTPRequestHandler):
    service: MarketingService

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            records = json.loads(body)
        except ValueError:
            records = None
        self._send(*self.service.answer(self.path, self.headers.get("Idempotency-Key", ""), records))

    def do_GET(self) -> None:
        ledger = self.service.ledger
        self._send(200, {"taken": ledger.taken, "calls": {str(status): n for status, n in ledger.answers.items()}})

    def _send(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="A marketing service with a bulk endpoint.")
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument("--calls-per-second", type=int, help="answer more with 429; default: no limit")
    parser.add_argument("--strict", action="store_true", help="answer 500 to a call with a poisonous record")
    asked = parser.parse_args()
    with MarketingService(port=asked.port, calls_per_second=asked.calls_per_second, strict=asked.strict) as service:
        print(f"MARKETING_URL={service.url}", flush=True)
        try:
            service.wait()
        except KeyboardInterrupt:
            print(json.dumps({str(status): calls for status, calls in service.ledger.answers.items()}))


if __name__ == "__main__":
    main()
