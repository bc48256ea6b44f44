"""A small shop whose tests are in `test_shop.py`."""

from __future__ import annotations

from typing import Any

from busload import Command, CommandBus, HandlerContext, RetryPolicy, TransientCommandError

bus = CommandBus()  # one for the whole application
carrier: list[int] = []


async def place_order(number: int, *, weight: int, conn: Any = None) -> None:
    """What a route of the shop calls."""
    await bus.send("shipping", "Ship", {"order": number, "weight": weight}, task_key=f"order:{number}", conn=conn)


@bus.handler("shipping", "Ship", retry=RetryPolicy(max_attempts=3, backoff=(60,)))
async def ship(command: Command, ctx: HandlerContext) -> dict[str, int]:
    if command.data["weight"] > 30:
        raise TransientCommandError("The carrier takes no more than 30 kg today.", code="TOO_HEAVY")
    carrier.append(command.data["order"])
    await ctx.send("mail", "OnItsWay", {"order": command.data["order"]})
    return {"attempt": ctx.attempt}
