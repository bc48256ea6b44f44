"""Failures, and what a person does about them: retry, complete or cancel what waits in troubleshooting.

python examples/operators.py
"""

from __future__ import annotations

import asyncio

from busload import BatchCommand, Command, CommandBus, HandlerContext, PermanentCommandError, RetryPolicy, Worker

bus = CommandBus()
closed = {"A-2", "A-3", "A-4"}


@bus.handler("payments", "Refund", retry=RetryPolicy(max_attempts=2, backoff=(0,)))
async def refund(command: Command, ctx: HandlerContext) -> None:
    account = command.data["account"]
    if account in closed:
        raise PermanentCommandError(f"Account {account} is closed.", code="CLOSED", details={"account": account})
    if account == "A-5":
        raise ConnectionError("The bank did not answer.")  # an unknown error is retried, then it waits for a person


async def main() -> None:
    async with bus:
        await bus.migrate()
        accounts = [BatchCommand("Refund", data={"account": f"A-{n}"}) for n in range(1, 6)]
        batch_id = await bus.create_batch("payments", accounts, name="Refunds")
        await Worker(bus).drain()

        batch = await bus.get_batch("payments", batch_id)
        assert batch is not None
        print(f"{batch.status}: {batch.completed_count} completed, {batch.in_troubleshooting_count} wait for a person")

        waiting = {item.data["account"]: item for item in await bus.troubleshooting.list("payments")}
        for account, item in sorted(waiting.items()):
            print(f"  {account} {item.reason:<9} after {item.attempts}: {item.last_error_message}")

        closed.discard("A-2")  # somebody opened the account again
        await bus.troubleshooting.retry("payments", waiting["A-2"].command_id, operator="rosa")
        await bus.troubleshooting.complete(
            "payments", waiting["A-3"].command_id, result={"by": "bank transfer"}, operator="rosa"
        )
        await bus.troubleshooting.cancel("payments", waiting["A-4"].command_id, reason="Not owed.", operator="rosa")
        await bus.troubleshooting.cancel("payments", waiting["A-5"].command_id, reason="Bank is gone.", operator="rosa")
        await Worker(bus).drain()

        batch = await bus.wait_batch("payments", batch_id, timeout=30)
        print(f"{batch.status}: {batch.completed_count} completed, {batch.canceled_count} canceled")

        print("What happened to A-2:")
        for event in await bus.get_audit_trail("payments", waiting["A-2"].command_id):
            print(f"  {event.type}" + (f" by {event.operator}" if event.operator else ""))


if __name__ == "__main__":
    asyncio.run(main())
