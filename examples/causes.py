"""Failures by cause: look at groups instead of items, repair the data of a whole group, and retry it.

python examples/causes.py
"""

from __future__ import annotations

import asyncio

from busload import BatchCommand, Command, CommandBus, HandlerContext, PermanentCommandError, Worker

bus = CommandBus()


@bus.handler("payments", "Refund")
async def refund(command: Command, ctx: HandlerContext) -> None:
    n = command.data["account"]
    if "currency" not in command.data:
        raise PermanentCommandError(f"Refund of account {n} has no currency.", code="CURRENCY")
    if n % 10 == 0:
        raise PermanentCommandError(f"Account 'A-{n}' is closed.", code="CLOSED")


def data(n: int) -> dict[str, object]:
    known: dict[str, object] = {"account": n, "cents": 100 * n}
    return known if n % 4 == 0 else known | {"currency": "EUR"}


async def main() -> None:
    async with bus:
        await bus.migrate()
        batch_id = await bus.create_batch("payments", [BatchCommand("Refund", data=data(n)) for n in range(1, 1001)])
        await Worker(bus).drain()

        groups = await bus.troubleshooting.groups("payments")
        for group in groups:
            print(f"{group.count} commands: {group.error_code}, such as: {group.message}")

        patch = [{"op": "add", "path": "/currency", "value": "EUR"}]
        look = await bus.troubleshooting.retry_group("payments", groups[0].fingerprint, patch=patch, dry_run=True)
        print(f"The patch fits all {look.count}: {look.sample[0].before} -> {look.sample[0].after}")

        retry = await bus.troubleshooting.retry_group("payments", groups[0].fingerprint, patch=patch, operator="rosa")
        assert retry.batch_id is not None
        await Worker(bus).drain()
        done = await bus.wait_batch("payments", retry.batch_id, timeout=30)
        print(f"{done.name.split(' (')[0] if done.name else ''}: {done.status}")

        [closed] = await bus.troubleshooting.groups("payments")
        await bus.troubleshooting.cancel_group("payments", closed.fingerprint, reason="Not owed.", operator="rosa")
        await Worker(bus).drain()

        batch = await bus.wait_batch("payments", batch_id, timeout=30)
        print(f"{batch.status}: {batch.completed_count} completed, {batch.canceled_count} canceled")
        for event in await bus.get_audit_trail("payments", look.sample[0].command_id):
            if event.operator:
                print(f"{event.type} by {event.operator}: {event.details['before']} -> {event.details['after']}")


if __name__ == "__main__":
    asyncio.run(main())
