"""Asks the broker of a bus whether it can be reached and lets us in."""

from __future__ import annotations

import asyncio

from busload.dispatch.publish import Publisher
from busload.dispatch.publish_in_threads import ThreadPublisher
from busload.doctor.catalog import finding
from busload.doctor.finding import Finding, FindingCode, Skipped
from busload.errors import TransportMisconfiguredError, TransportUnavailableError
from busload.health.health import HealthCode
from busload.transports import Transport
from busload.transports.base import without_password

REROUTE = ("busload outbox ls", "busload outbox reroute --dry-run")


async def ask_broker(publisher: Publisher, prefix: str, within: float) -> Finding | Skipped | None:
    """What is wrong with the broker; None if nothing is."""
    return await _ask(publisher.transport, f"{prefix}.busload_doctor", within)


def ask_broker_in_threads(publisher: ThreadPublisher, prefix: str, within: float) -> Finding | Skipped | None:
    """The same for code that runs in threads."""
    return publisher.run(_ask(publisher.transport, f"{prefix}.busload_doctor", within))


async def _ask(transport: Transport, queue: str, within: float) -> Finding | Skipped | None:
    """Ask for the depth of a queue that nobody has: every broker has to let us in for the answer."""
    where = f"{transport.name} at {without_password(transport.url)}"
    try:
        async with asyncio.timeout(within):
            if await transport.depth(queue) is None:
                return Skipped("broker", f"{transport.name} does not answer a question without a message.")
    except TimeoutError:
        return finding(HealthCode.BROKER_UNREACHABLE, f"{where} has not answered for {within:g} s.", run=REROUTE)
    except TransportUnavailableError as error:
        return finding(HealthCode.BROKER_UNREACHABLE, f"{where} cannot be reached: {error}", run=REROUTE)
    except TransportMisconfiguredError as error:
        return finding(FindingCode.BROKER_REFUSES, f"{where} refuses us: {error}", run=REROUTE)
    return None
