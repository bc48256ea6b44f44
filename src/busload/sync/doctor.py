"""Made from busload.doctor.api by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import secrets
from datetime import timedelta

import psycopg

from busload.commands.checks import seconds_of
from busload.dispatch.publish_in_threads import ThreadPublisher
from busload.doctor.api import CHANNEL, RESPONSE_WITHIN, _disk, _unreachable, _unseen
from busload.doctor.broker import ask_broker_in_threads as ask_broker
from busload.doctor.facts import Facts, read
from busload.doctor.finding import CHECKS, Diagnosis, Finding, Skipped
from busload.doctor.findings import examine
from busload.doctor.findings_of_work import judge_health
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.connection import Connection
from busload.sync.connection import connect
from busload.sync.health import HealthVerbs
from busload.sync.plan import perform


class DoctorVerbs(HealthVerbs):
    """The verb of a bus that looks for faults, and names their cures."""

    _publisher: ThreadPublisher | None

    def doctor(self, *, timeout: timedelta | float = 30) -> Diagnosis:
        """Look for faults of the server, the schema, the workers, the work and the broker.

        It does not raise because something is wrong, and writes nothing: what cannot be seen is among `skipped`.
        `timeout` is how long it may take, in seconds if it is a number; it usually takes a tenth of one.
        `settings.doctor` says from when on something is a fault.
        """
        seconds = seconds_of(timeout)
        try:
            with waiting.TimeLimit(seconds):
                with connect(self.database.dsn, response_timeout=RESPONSE_WITHIN) as conn:
                    facts = self._facts_of(conn)
                    found = list(examine(facts, self.settings.doctor))
                    skipped = [*facts.skipped, *_unseen(facts)]
                if facts.migrations is not None:
                    found += judge_health(self.health(timeout=RESPONSE_WITHIN))
                checked = list(CHECKS)
                if self._publisher is None:
                    checked.remove("broker")
                else:
                    prefix = self.settings.queue_prefix
                    answer = ask_broker(self._publisher, prefix, RESPONSE_WITHIN)
                    found += [answer] if isinstance(answer, Finding) else []
                    skipped += [answer] if isinstance(answer, Skipped) else []
        except (psycopg.Error, TimeoutError) as error:  # DatabaseUnavailableError is one
            return _unreachable(error, self.database.dsn, seconds)
        return Diagnosis.of(found, checked, skipped)

    def _facts_of(self, conn: Connection) -> Facts:
        with conn.transaction():
            facts = perform(conn, read(self.settings.doctor))
        facts.pooled = facts.server is not None and facts.server.backend_pid != conn.info.backend_pid
        facts.disk = _disk(conn.info.host, facts)
        try:
            facts.heard = self._hears(conn)
        except psycopg.Error as error:
            facts.skipped.append(Skipped("notifications", " ".join(str(error).split())))
        return facts

    def _hears(self, conn: Connection) -> bool:
        """Whether a notification of one session reaches another: a pooler may be in its way."""
        token = secrets.token_hex(8)
        conn.execute(f"LISTEN {CHANNEL}")
        with connect(self.database.dsn, response_timeout=RESPONSE_WITHIN) as other:
            other.execute("SELECT pg_catalog.pg_notify(%s::text, %s::text)", [CHANNEL, token])
        heard = False
        for notification in conn.notifies(timeout=self.settings.doctor.notify_within.total_seconds()):
            if notification.payload == token:
                heard = True
                break
        conn.execute(f"UNLISTEN {CHANNEL}")
        return heard
