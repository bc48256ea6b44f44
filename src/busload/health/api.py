"""`bus.health()` and `bus.overview()`: whether all is well, and what waits where."""

from __future__ import annotations

from datetime import timedelta

import psycopg

from busload.commands.checks import seconds_of
from busload.errors import DatabaseUnusableError, SchemaOutdatedError
from busload.health import facts
from busload.health.health import Health, HealthCode, HealthReason, critical, exhausted, judge
from busload.health.overview import Overview, overview
from busload.postgres import waiting
from busload.postgres.database import Database
from busload.settings import Settings


class HealthVerbs:
    """The verbs of a bus that tell how it is."""

    database: Database
    settings: Settings

    async def health(self, *, timeout: timedelta | float = 5) -> Health:
        """Say whether all is well: the database, the workers of all domains, and publishing to the broker.

        It does not raise because something is wrong: that is what it tells. `timeout` is how long it waits for the
        database, in seconds if it is a number. `settings.health` says from when on something is wrong.
        """
        seconds, settings, pool = seconds_of(timeout), self.settings.health, self.database.pool
        look_back = settings.look_back.total_seconds()
        reasons: list[HealthReason] = []
        known = pool.exhaustions(look_back)
        try:
            async with waiting.TimeLimit(seconds) as limit:
                found = await self.database.in_transaction(
                    facts.read(), within=0.8 * limit.left
                )  # before the limit interrupts it
            reasons += judge(found, settings)
        except SchemaOutdatedError as error:
            return critical(HealthCode.SCHEMA_OUTDATED, str(error))
        except DatabaseUnusableError as error:
            return critical(HealthCode.DATABASE_UNUSABLE, str(error))
        except (psycopg.Error, TimeoutError) as error:  # DatabaseUnavailableError is one
            if pool.exhaustions(look_back) == known:  # else there is a database, but no connection was free
                said = " ".join(str(error).split()) or f"no answer within {seconds:g} s"
                return critical(HealthCode.DATABASE_UNREACHABLE, f"The database cannot be reached: {said}")
        if times := pool.exhaustions(look_back):
            reasons.append(exhausted(times, settings, "This bus"))
        return Health.of(reasons)

    async def overview(self) -> Overview:
        """The whole bus at one moment: what waits, runs and needs a person, in each domain, and who serves it."""
        return await self.database.in_transaction(overview())
