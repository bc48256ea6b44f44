"""The one handler that every worker has: it carries out what a person decided about a cause, chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from busload.domain.cause import read_chunk, summary
from busload.domain.command import Command
from busload.domain.retry import RetryPolicy
from busload.store import operate
from busload.store.plan import perform_async

if TYPE_CHECKING:
    from busload.worker.context import HandlerContext

RETRY = RetryPolicy(max_attempts=5, backoff=(1, 5, 30, 60))


async def resolve(command: Command, ctx: HandlerContext) -> dict[str, Any] | None:
    """Move the items of a chunk; they move if this completes, so that nothing is moved twice.

    Returns how many have moved, and which have not and why.
    """
    chunk, limits = read_chunk(command.data), ctx._bus.settings.limits.payload
    async with ctx.transaction() as conn:
        lease_id = ctx._leased.lease.lease_id
        plan = operate.resolve(command.domain, chunk, action=command.batch_id, lease_id=lease_id, limits=limits)
        moved, left = await perform_async(conn, plan)
    return summary(moved, left, limits)
