"""What Tab offers where a domain, an id or a name is wanted: asked from the database in a moment, or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import click
from click.shell_completion import CompletionItem

Complete: TypeAlias = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

MOST = 50
"""What a person can still choose from."""
WITHIN = "300ms"
"""How long a statement may take."""

QUERIES = {
    "domain": """
        WITH RECURSIVE known AS (
            SELECT min(domain) AS name FROM busload.batch
            UNION ALL
            SELECT (SELECT min(b.domain) FROM busload.batch AS b WHERE b.domain > k.name) FROM known AS k
             WHERE k.name IS NOT NULL
        ), sent AS (
            SELECT min(domain) AS name FROM busload.command
            UNION ALL
            SELECT (SELECT min(c.domain) FROM busload.command AS c WHERE c.domain > k.name) FROM sent AS k
             WHERE k.name IS NOT NULL
        )
        SELECT name, '' FROM (
            SELECT name FROM known UNION SELECT name FROM sent
            UNION SELECT unnest(domains) FROM busload.worker WHERE stopped_at IS NULL
        ) AS found
         WHERE pg_catalog.starts_with(name, %(begin)s::text) ORDER BY name LIMIT %(most)s""",
    "batch": """
        SELECT batch_id::text, pg_catalog.concat_ws(' ', domain, name, status) FROM busload.batch
         WHERE pruned_at IS NULL AND batch_id BETWEEN %(first)s AND %(last)s
         ORDER BY batch_id DESC LIMIT %(most)s""",
    "job": """
        SELECT job_id::text, pg_catalog.concat_ws(' ', domain, name, status) FROM busload.job
         WHERE job_id BETWEEN %(first)s AND %(last)s ORDER BY job_id DESC LIMIT %(most)s""",
    "command": """
        SELECT command_id::text, pg_catalog.concat_ws(' ', domain, command_type) FROM (
            SELECT domain, command_id, command_type FROM busload.command ORDER BY id DESC LIMIT 1000) AS newest
         WHERE command_id BETWEEN %(first)s AND %(last)s ORDER BY command_id DESC LIMIT %(most)s""",
    "troubled command": """
        SELECT c.command_id::text, pg_catalog.concat_ws(' ', c.domain, c.command_type, t.error ->> 'message')
          FROM (SELECT command, error FROM busload.troubleshooting ORDER BY command DESC LIMIT 1000) AS t
          JOIN busload.command AS c ON c.id = t.command
         WHERE c.command_id BETWEEN %(first)s AND %(last)s ORDER BY c.command_id DESC LIMIT %(most)s""",
    "buffer": """
        SELECT buffer, coalesce(relation, '') FROM busload.buffer
         WHERE pg_catalog.starts_with(buffer, %(begin)s::text) ORDER BY buffer LIMIT %(most)s""",
    "limit": """
        SELECT DISTINCT name, '' FROM busload.rate_limit
         WHERE pg_catalog.starts_with(name, %(begin)s::text) ORDER BY name LIMIT %(most)s""",
    "schedule": """
        SELECT name, domain FROM busload.schedule
         WHERE pg_catalog.starts_with(name, %(begin)s::text) ORDER BY name LIMIT %(most)s""",
    "cause": """
        SELECT fingerprint, pg_catalog.concat_ws(' ', domain, count(*), min(error ->> 'message'))
          FROM (SELECT fingerprint, domain, error FROM busload.troubleshooting LIMIT 10000) AS t
         WHERE pg_catalog.starts_with(fingerprint, %(begin)s::text)
         GROUP BY fingerprint, domain ORDER BY count(*) DESC LIMIT %(most)s""",
}
"""Each gives what may be typed, and what it is. They look into indexes, or at the newest rows only."""


def completes(what: str) -> Complete:
    """Complete from the database; silent if it is away, slow, or without our schema."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            return [CompletionItem(found, help=about or None) for found, about in _ask(ctx, what, incomplete)]
        except Exception:  # whatever it is: a person who presses Tab is not to read a traceback
            return []

    return complete


def _ask(ctx: click.Context, what: str, incomplete: str) -> Sequence[Any]:
    dsn = ctx.meta.get("BUSLOAD_DATABASE_URL") or os.environ.get("BUSLOAD_DATABASE_URL") or _embedded()
    if dsn is None:
        return ()
    import psycopg
    from psycopg.conninfo import make_conninfo

    digits = incomplete.replace("-", "").lower()
    params: dict[str, Any] = {"begin": incomplete, "most": MOST}
    if set(digits) <= set("0123456789abcdef") and len(digits) <= 32:
        params |= {"first": digits.ljust(32, "0"), "last": digits.ljust(32, "f")}
    conninfo = make_conninfo(dsn, connect_timeout=1, application_name="busload completion")
    with psycopg.connect(conninfo, prepare_threshold=None) as conn:
        conn.execute(f"SET LOCAL statement_timeout = '{WITHIN}'")
        conn.execute("SET LOCAL search_path = pg_catalog, pg_temp")
        return conn.execute(QUERIES[what].encode(), params).fetchall()


def _embedded() -> str | None:
    """The embedded server, if it runs. Tab starts none."""
    from busload.postgres.embedded.server import EmbeddedPostgres
    from busload.settings import Settings

    settings = Settings()
    found = EmbeddedPostgres(settings.home, pg_bin=settings.pg_bin).info
    return found.dsn if found.running else None
