"""A server of the doctor's own, as people run it, and a patient: a database that one test makes ill and cures."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg.conninfo import make_conninfo

from busload import Command, CommandBus, HandlerContext, Settings, Worker, WorkerSettings
from busload.cli import main
from busload.doctor import Diagnosis, DoctorSettings, Finding
from busload.testing import TestServer
from tests.conftest import server_home
from tests.given import DOMAIN, Database, Given

SOON = 25.0
"""Seconds after which a reload, an ended session or a worker has not taken effect."""
WORKER = WorkerSettings(
    poll_every=timedelta(milliseconds=50),
    sweep_every=timedelta(milliseconds=100),
    lease_for=timedelta(seconds=1),
    flush_deadline=timedelta(milliseconds=200),
)
"""A worker that takes others for dead after a second."""


@pytest.fixture(scope="session")
def ward() -> Iterator[TestServer]:
    """A server with the settings of production: the one of other tests may lose its data. One for the whole run."""
    home = server_home("doctor")
    home.mkdir(mode=0o755, parents=True, exist_ok=True)
    with TestServer(home, config={"max_prepared_transactions": "5", "max_connections": "50"}) as server:
        yield server


class Patient:
    """A database, and what a person with all rights does to it."""

    def __init__(self, dsn: str) -> None:
        self.dsn, self.database = dsn, Database(dsn)
        self.settings = DoctorSettings()
        self.transport: str | None = None

    def sql(self, *statements: str) -> None:
        for statement in statements:
            self.database.rows(statement)

    @property
    def name(self) -> str:
        return str(psycopg.conninfo.conninfo_to_dict(self.dsn)["dbname"])

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[CommandBus]:
        async with CommandBus(self.dsn, transport=self.transport, settings=Settings(doctor=self.settings)) as bus:
            yield bus

    @asynccontextmanager
    async def given(self) -> AsyncIterator[Given]:
        async with self.bus() as bus:
            yield Given(bus, self.database, WORKER)

    async def diagnosis(self) -> Diagnosis:
        async with self.bus() as bus:
            return await bus.doctor()

    async def codes(self) -> list[str]:
        return [found.code.value for found in (await self.diagnosis()).findings]

    async def is_found(self, *codes: str) -> Diagnosis:
        """Wait until these are all findings: a reload and an ended session take effect a little later."""
        end = time.monotonic() + SOON
        while True:
            found = await self.diagnosis()
            seen = sorted(one.code.value for one in found.findings)
            if seen == sorted(codes):
                return found
            assert time.monotonic() < end, f"found {seen}, wanted {sorted(codes)}"
            await asyncio.sleep(0.05)

    def busload(self, *words: str) -> Result:
        return CliRunner().invoke(main, list(words), env={"BUSLOAD_DATABASE_URL": self.dsn})

    def elsewhere(self, *words: str) -> Result:
        """`busload` where no variable names this database."""
        return CliRunner().invoke(main, list(words), env={"BUSLOAD_DATABASE_URL": "postgresql://127.0.0.1:1/elsewhere"})

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[None]:
        """`busload worker`, in this process."""
        async with self.bus() as bus:

            @bus.handler(DOMAIN, "Debit")
            async def handle(command: Command, ctx: HandlerContext) -> None: ...

            bus.handler(DOMAIN, "Refuse")(handle)
            worker = Worker(bus, settings=WORKER)
            task = asyncio.create_task(worker.run())
            try:
                yield
            finally:
                worker.stop()
                await task

    @asynccontextmanager
    async def cured(self, found: Finding) -> AsyncIterator[None]:
        """Do what the finding says, to the letter."""
        self.sql(*found.sql)
        works = [line for line in found.run if line.startswith("busload worker ")]
        for line in found.run:
            if line not in works:
                done = await asyncio.to_thread(self.busload, *self.words(line))
                assert done.exit_code == 0, done.output
        if works:
            async with self.worker():
                yield
        else:
            yield

    def words(self, line: str) -> list[str]:
        """The words of a line, with what a person fills in. `dsn` is that of the owner then."""
        causes = "SELECT fingerprint FROM busload.troubleshooting LIMIT 1"
        words = [
            self.dsn if word == "DSN of the owner" else word for word in shlex.split(line.removeprefix("busload "))
        ]
        return [str(self.database.value(causes)) if word == "FINGERPRINT" else word for word in words]


@pytest.fixture
def patient(ward: TestServer) -> Iterator[Patient]:
    """One at a time, in all processes: some faults are the server's."""
    with ward.database() as dsn, psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True) as turn:
        turn.execute("SELECT pg_advisory_lock(27711006262190438)")
        patient = Patient(dsn)
        with patient.database:
            yield patient
