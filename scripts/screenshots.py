"""Take pictures of every page of the dashboard: light, dark and on a phone, and an animation of a batch.

    python scripts/screenshots.py                      all pages, into docs/assets/dashboard
    python scripts/screenshots.py --only batches       one page of the navigation, and what it leads to

A database is filled with a story of its own, and pages are found by following the navigation.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import random
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import uvicorn
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright
from psycopg import sql

from busload import BatchCommand, CommandBus, HandlerContext, PermanentCommandError, Settings, Worker, WorkerSettings
from busload.batches.guards import Canary, FailureBudget
from busload.commands.command import Command
from busload.commands.send import NO_BROKER
from busload.dashboard import Principal, Role, app
from busload.jobs.job import Stage
from busload.schedules.fire import fire
from busload.testing import TestServer

CHROMIUM = "/usr/bin/chromium"
FLAGS = ("--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-color-profile=srgb")
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}
COLOURS = 200
"""Of a picture: enough for text, lines and badges, and small."""
PATIENCE = 30_000
FRAMES, EVERY = 26, 0.35
"""Pictures of the animation, and seconds between them."""


@dataclass(frozen=True, slots=True)
class Shot:
    """A page to take a picture of."""

    name: str
    path: str


# -- the story ---------------------------------------------------------------------------------------------------------


async def tell(bus: CommandBus, dsn: str, share: float = 1.0) -> None:
    """A shop at the end of a month: salaries, invoices, mail, and what goes wrong with them."""
    _handlers(bus)

    def some(count: int) -> range:
        return range(max(50, int(share * count)))

    await bus.create_batch(
        "payments",
        [BatchCommand("Debit", data=_invoice(n), task_key=f"invoice:{n}") for n in some(4000)],
        name="Salaries of October",
        custom_data={"month": "2026-10", "approved_by": "ada"},
        on_complete=BatchCommand("Report", data={"to": "finance@example.com"}),
    )
    await bus.create_batch(
        "payments",
        [BatchCommand("Debit", data={**_invoice(n), "currency": "XXX" if n % 40 == 0 else "EUR"}) for n in some(900)],
        name="Invoices of November",
        budget=FailureBudget(share=0.1),
    )
    await bus.create_batch("mail", [BatchCommand("Send", data={"to": f"{n}@example.com"}) for n in some(1500)])
    await Worker(bus, name="worker-1", domains=["payments", "mail"], settings=WorkerSettings(concurrency=20)).drain()
    _tidy(dsn)
    await bus.create_batch("crm", [BatchCommand("Push", data={"contact": n}) for n in some(800)], name="Contacts")
    held = await bus.create_batch("mail", [BatchCommand("Send", data={"to": f"{n}"}) for n in some(300)], name="Offers")
    await bus.hold_batch("mail", held, reason="the text is not approved", operator="grace")
    await bus.domains.pause("crm", reason="the other side is being upgraded", operator="ada")
    for n in range(40):
        await bus.send("mail", "Remind", {"invoice": n}, run_at=_in(hours=2 + n / 10))
    await bus.create_batch(
        "payments",
        [BatchCommand("Debit", data={**_invoice(n), "slow": True}) for n in some(6000)],
        name="Salaries of November",
        canary=Canary(size=20),
        on_complete=BatchCommand("Report"),
    )
    await _tell_the_rest(bus, dsn)


async def _tell_the_rest(bus: CommandBus, dsn: str) -> None:
    """Jobs, a buffer with a group that failed, limits, and messages that a broker did not take."""

    async def refuse(command: Command, ctx: HandlerContext) -> None:
        raise PermanentCommandError("the ledger is closed", code="LEDGER_CLOSED")

    events = bus.buffer("contact_events", size=50, max_age=timedelta(hours=1))
    events.handler()(refuse)
    for name in ("Load", "Post", "Publish"):
        bus.handler("reports", name)(refuse if name == "Post" else _nothing)
    for month in ("September", "October"):
        await bus.jobs.create("reports", _stages(), name=f"Report of {month}")
    for n in range(50):
        await events.add({"contact": n})
    await Worker(bus, name="worker-2", domains=["reports", "contact_events"]).drain()
    [failed, *_] = await bus.troubleshooting.list("reports")
    await bus.troubleshooting.cancel("reports", failed.command_id, reason="not this year", operator="grace")
    for n in range(17):
        await events.add({"contact": n})
    await _tell_schedules(bus, dsn)
    await bus.create_batch("shipping", [BatchCommand("Label", data={"parcel": n}) for n in range(120)], name="Parcels")
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(OUTBOX)
        conn.execute(LIMITS)


async def _tell_schedules(bus: CommandBus, dsn: str) -> None:
    """Schedules that were fired, triggered and paused."""
    report = BatchCommand("Report", data={"to": "finance@example.com"})
    bus.schedule("nightly-report", cron="0 2 * * *", timezone="Europe/Paris", command=report, domain="payments")
    remind, push = BatchCommand("Remind", data={"invoice": 7}), BatchCommand("Push", data={"contact": "all"})
    bus.schedule("reminders", cron="*/15 8-18 * * 1-5", timezone="America/New_York", command=remind, domain="mail")
    bus.schedule("sync-contacts", every=timedelta(hours=6), command=push, domain="crm", catch_up="skip")
    await bus.schedules.sync()
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("UPDATE busload.schedule SET next_due_at = now() - interval '2 seconds' WHERE domain <> 'crm'")
    await bus.database.in_transaction(fire(NO_BROKER))
    await bus.schedules.trigger("nightly-report", operator="ada")
    await bus.schedules.pause("sync-contacts", reason="the other side is being upgraded", operator="ada")


def _stages() -> list[Stage]:
    load = [BatchCommand("Load", data={"region": region}) for region in ("north", "east", "south", "west")]
    return [
        Stage("load", load, compensate=BatchCommand("Unload")),
        Stage("post", [BatchCommand("Post")], compensate=BatchCommand("Unpost")),
        Stage("publish", [BatchCommand("Publish")]),
    ]


async def _nothing(command: Command, ctx: HandlerContext) -> None:
    pass


OUTBOX = """
    WITH waiting AS (DELETE FROM busload.queue WHERE domain = 'shipping' RETURNING *)
    INSERT INTO busload.outbox (lo, hi, domain, batch_id, transport, rounds, reason, error, failed_at)
    SELECT lo, hi, domain, batch_id, 'redis', 3, 'UNREACHABLE', 'connection refused', now() FROM waiting
"""
"""What a broker that is away leaves behind."""

LIMITS = """
    INSERT INTO busload.rate_limit (name, subject, adaptive, rate, ceiling, blocked_until, calls, refused)
    VALUES ('bank', '', true, 12.5, 20, now() + interval '1 hour', 48210, 31),
           ('crm', 'tenant 7', false, 5, 5, now() - interval '1 hour', 9120, 0)
"""


def _handlers(bus: CommandBus) -> None:
    slow = random.Random(7)  # noqa: S311

    async def debit(command: Command, ctx: HandlerContext) -> Any:
        if command.data.get("currency") == "XXX":
            invoice = command.data["invoice"]
            raise PermanentCommandError(f"unknown currency of invoice {invoice}", code="UNKNOWN_CURRENCY")
        if "slow" in command.data:
            await asyncio.sleep(slow.uniform(0.02, 0.1))
        return {"paid": command.data["invoice"]}

    async def done(command: Command, ctx: HandlerContext) -> Any:
        if command.command_type == "Send" and command.data.get("to", "").startswith("66"):
            raise PermanentCommandError("the mailbox is full", code="MAILBOX_FULL")
        return {"ok": True}

    bus.handler("payments", "Debit")(debit)
    for domain, kind in (("payments", "Report"), ("mail", "Send"), ("mail", "Remind"), ("crm", "Push")):
        bus.handler(domain, kind)(done)


def _invoice(n: int) -> dict[str, Any]:
    return {"invoice": 20_000 + n, "amount": {"value": 100 + n * 7 % 900, "currency": "EUR"}, "iban": f"NL00BANK{n:08}"}


def _in(**time: float) -> datetime:
    return datetime.now(UTC) + timedelta(**time)


def _tidy(dsn: str) -> None:
    """Leave a day of statistics, as workers would have, and name the file of the shop in tracebacks."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(HISTORY)
        for table, column in (("execution", "details"), ("troubleshooting", "error")):
            said = sql.Identifier(column)
            conn.execute(
                sql.SQL("UPDATE busload.{} SET {} = replace({}::text, %s, %s)::json WHERE {} IS NOT NULL").format(
                    sql.Identifier(table), said, said, said
                ),
                [__file__, "shop/handlers.py"],
            )


HISTORY = """
    INSERT INTO busload.statistics (at, domain, completed, failed, retried, troubled, seconds, ready, scheduled,
                                    running, in_troubleshooting, unpublished, oldest_ready)
    SELECT date_trunc('minute', now()) - minute * interval '1 minute', row.*
      FROM generate_series(1, 1439) AS minute
     CROSS JOIN LATERAL (
        SELECT 'payments',
               (17000 + 8000 * sin(minute / 90.0) + 3000 * sin(minute / 7.0) + 900 * random())::integer,
               (30 + 28 * sin(minute / 11.0))::integer,
               (90 + 80 * sin(minute / 13.0))::integer,
               CASE WHEN minute % 17 < 3 THEN 40 ELSE 0 END,
               60.0,
               (2600 + 1900 * sin(minute / 9.0))::integer, 340, (14 + 6 * sin(minute / 3.0))::integer,
               greatest(34, 300 - minute * 2), 0, 8 + 7 * sin(minute / 9.0)
        UNION ALL
        SELECT '', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL  -- that somebody looked
     ) AS row
"""
"""A day of a shop."""


# -- the pictures ------------------------------------------------------------------------------------------------------


async def take(out: Path, *, only: str | None = None, animate: bool = True, share: float = 1.0) -> list[Path]:
    """Take all pictures, or those of one page of the navigation, and return their files.

    `share` makes the story smaller.
    """
    async with AsyncExitStack() as stack:
        dsn = stack.enter_context(_database())
        settings = Settings(database_url=dsn, poll_every=timedelta(milliseconds=200))
        bus = await stack.enter_async_context(CommandBus(dsn, settings=settings))
        await tell(bus, dsn, share)
        base = await stack.enter_async_context(_served(bus))
        browser = await stack.enter_async_context(_chromium())
        taken: list[Path] = []
        async with _working(bus):
            shots = await _shots(browser, base, only)
            for look, options in LOOKS.items():
                context = await browser.new_context(timezone_id="Europe/Amsterdam", locale="en-GB", **options)
                page = await context.new_page()
                page.set_default_timeout(PATIENCE)
                for shot in shots:
                    await _open(page, base + shot.path)
                    file = out / f"{shot.name}-{look}.png"
                    _save(await page.screenshot(animations="disabled"), file)
                    taken.append(file)
                await context.close()
            if animate:
                taken.append(await _animation(browser, base, bus, out / "batch.gif"))
        return taken


async def _shots(browser: Browser, base: str, only: str | None) -> list[Shot]:
    """The pages of the navigation, and the first thing that each of them lists."""
    page = await browser.new_page()
    page.set_default_timeout(PATIENCE)
    await page.goto(base + "/")
    named = {}
    for link in await page.locator("nav.side a").all():
        label, path = (await link.inner_text()).strip(), await link.get_attribute("href") or "/"
        named[label.lower().replace(" ", "-")] = path
    if only is not None:
        if only not in named:
            raise SystemExit(f"There is no page {only!r} in the navigation; there are {', '.join(named)}.")
        named = {only: named[only]}
    shots = []
    for name, path in named.items():
        shots.append(Shot(name, path))
        await page.goto(base + path)
        one = page.locator("main tbody th a").first
        if await one.count():
            target = (await one.get_attribute("href") or "").split("?")[0]
            if target not in (path, "") and target not in named.values():
                shots.append(Shot(f"{name}-one", target))
    if only in (None, "batches"):
        shots.append(Shot("batches-new", "/batches/new"))
    await page.close()
    return shots


async def _open(page: Page, address: str) -> None:
    """Open a page and wait until it stands: its parts are there, and its numbers are live."""
    await page.goto(address)
    if await page.locator("main[data-live-url]").count():
        await page.locator('#feed[data-state="live"]').wait_for(state="attached")
    if await page.locator(".why").count():
        await page.locator(".why p").first.wait_for(state="attached")
    await page.evaluate("document.fonts.ready")


async def _animation(browser: Browser, base: str, bus: CommandBus, file: Path) -> Path:
    """A batch from its first command to its last."""
    slow = [BatchCommand("Debit", data={**_invoice(n), "slow": True}) for n in range(1100)]
    slow += [BatchCommand("Debit", data={**_invoice(n), "currency": "XXX"}) for n in range(24)]
    random.Random(3).shuffle(slow)  # noqa: S311
    options: dict[str, Any] = {"viewport": {"width": 900, "height": 430}, "color_scheme": "light"}
    context = await browser.new_context(timezone_id="Europe/Amsterdam", locale="en-GB", **options)
    page = await context.new_page()
    batch_id = await bus.create_batch("payments", slow, name="Refunds", priority=9)
    await page.goto(f"{base}/batches/{batch_id}")
    frames = []
    for _ in range(FRAMES):
        frames.append(Image.open(io.BytesIO(await page.screenshot())).convert("RGB"))
        await asyncio.sleep(EVERY)
    await context.close()
    palette = _palette(frames[len(frames) // 2])
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [350] * (len(small) - 1) + [2500]
    small[0].save(file, save_all=True, append_images=small[1:], duration=times, loop=0, optimize=True)
    return file


def _save(png: bytes, file: Path) -> None:
    """As a picture of few colours, which is a third of the size."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(palette=_palette(picture), dither=Image.Dither.NONE).save(file, optimize=True)


def _palette(picture: Image.Image) -> Image.Image:
    """The colours that a picture has most, as they are, and others that stand for the rest.

    So grounds and texts do not change, and a small badge keeps its colour too.
    """
    counted = sorted(picture.getcolors(picture.width * picture.height) or [], reverse=True)
    found: list[Any] = [colour for _, colour in counted]
    colours = found[: COLOURS // 2]
    if rest := found[COLOURS // 2 :]:
        others = Image.new("RGB", (len(rest), 1))
        others.putdata(rest)
        few = others.quantize(COLOURS - len(colours), method=Image.Quantize.MEDIANCUT).convert("RGB")
        colours += [colour for _, colour in few.getcolors(len(rest)) or []]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in colours for part in colour])
    return palette


# -- what serves them --------------------------------------------------------------------------------------------------


@contextmanager
def _database() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o755)
        with TestServer(Path(home) / "server", config={"fsync": "off"}) as server, server.database() as dsn:
            yield dsn


@asynccontextmanager
async def _served(bus: CommandBus) -> AsyncIterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    served = app(bus, create=True, authenticate=lambda request: Principal("ada", Role.OPERATOR))
    server = uvicorn.Server(uvicorn.Config(served, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    task = asyncio.create_task(server._serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def _chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def _working(bus: CommandBus) -> AsyncIterator[None]:
    """A worker that is slow, so that pictures show work."""
    worker = Worker(bus, name="worker-1", domains=["payments", "mail"], settings=WorkerSettings(concurrency=8))
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        with suppress(asyncio.CancelledError):
            await task


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Take pictures of every page of the dashboard.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/assets/dashboard")
    parser.add_argument("--only", metavar="PAGE", help="a page of the navigation, such as batches")
    parser.add_argument("--still", action="store_true", help="no animation")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    logging.getLogger("busload").setLevel(logging.CRITICAL)  # commands of the story fail on purpose
    given = _arguments(words)
    given.out.mkdir(parents=True, exist_ok=True)
    for line in _told(asyncio.run(take(given.out, only=given.only, animate=not given.still))):
        print(line)


def _told(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        yield f"{file.stat().st_size / 1000:6.0f} kB  {file}"


if __name__ == "__main__":
    main()
