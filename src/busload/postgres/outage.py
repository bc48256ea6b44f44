"""What the log says while something does not work: a line when it begins, one a minute, and one at its end.

Many parts of a worker notice that the database is away, each of them every second or two. They share one `Outage`, so
that the log says it once.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import psycopg

log = logging.getLogger("busload")

SAY_EVERY = 60.0
"""Seconds between two lines about what still does not work."""

QUIET = 1.0
"""Seconds without a failure after which the database is said to be back: connections break one after the other."""

_AWAY = "the database"
_LOST = ("08", "57P", "53300")


@dataclass(slots=True)
class _Trouble:
    since: float
    said: float
    over: float | None = None
    """When it worked for the first time since its last failure."""


class Outage:
    """What does not work at present. All parts of a worker report here, also from other threads."""

    def __init__(self) -> None:
        self._troubles: dict[str, _Trouble] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    @property
    def is_away(self) -> bool:
        """Whether the database cannot be reached."""
        return _AWAY in self._troubles

    def failed(self, part: str, error: BaseException, *, of: str = "") -> None:
        """A part has failed and will try again: because the database is away, or for a reason of its own.

        `of` says for the log how much it concerns, such as "12 items".
        """
        log.debug("%s failed: %r", part, error)
        now = time.monotonic()
        away = is_lost(error) or (isinstance(error, TimeoutError) and self.is_away)  # it waited for a connection
        key = _AWAY if away else part
        with self._lock:
            trouble = self._troubles.get(key)
            if trouble is None:
                self._troubles[key] = _Trouble(now, now)
                if away:
                    log.warning("The database cannot be reached, trying until it is back: %s", _words(error))
                else:
                    log.warning("%s failed%s, trying again: %r", part, of and f" with {of}", error)
                return
            trouble.over = None
            if now - trouble.said >= SAY_EVERY:
                trouble.said = now
                if away:
                    log.warning("The database has been away for %.0f s: %s", now - trouble.since, _words(error))
                else:
                    log.warning("%s has failed for %.0f s: %r", part, now - trouble.since, error)

    def worked(self, part: str, *, reached: bool = False) -> None:
        """A part has done its work; `reached` says that it has spoken to the database for that."""
        if not self._troubles:
            return
        with self._lock:
            trouble = self._troubles.pop(part, None)
            if trouble is not None:
                log.warning("%s works again after %.1f s", part, time.monotonic() - trouble.since)
            away = self._troubles.get(_AWAY)
            if reached and away is not None and away.over is None:
                away.over = time.monotonic()
                self._look_later()

    def close(self) -> None:
        """Log what is over, and stop."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._end(after=0.0)

    def _look_later(self) -> None:
        """Look again after a while whether the database is still there."""
        if self._timer is None:
            self._timer = threading.Timer(QUIET, self._look)
            self._timer.name = "busload-outage"
            self._timer.daemon = True
            self._timer.start()

    def _look(self) -> None:
        with self._lock:
            self._timer = None
            self._end(after=QUIET)

    def _end(self, *, after: float) -> None:
        """Say that the database is back, if it has worked for so many seconds."""
        away = self._troubles.get(_AWAY)
        if away is None or away.over is None:
            return
        if time.monotonic() - away.over < after:  # it failed and worked meanwhile
            self._look_later()
        else:
            del self._troubles[_AWAY]
            log.warning("The database is back after %.1f s", away.over - away.since)


def is_lost(error: BaseException) -> bool:
    """Whether an error says that there is no connection. Other errors are answers of the server to a statement."""
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    return error.sqlstate is None or error.sqlstate.startswith(_LOST)


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
