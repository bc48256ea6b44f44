"""A saga: a trip is booked in three stages. The last one fails, so the others are undone, the last one first.

python examples/saga.py
"""

from __future__ import annotations

import asyncio

from busload import BatchCommand, BusinessRuleError, Command, CommandBus, HandlerContext, Stage, Worker, handler

bus = CommandBus()


class Travel:
    """Every handler of the trip. One that undoes something does no harm if there is nothing to undo."""

    def __init__(self) -> None:
        self.booked: set[str] = set()

    @handler("travel", "Book")
    async def book(self, command: Command, ctx: HandlerContext) -> None:
        self.booked.add(command.data["what"])
        print("book", command.data["what"])

    @handler("travel", "Unbook")
    async def unbook(self, command: Command, ctx: HandlerContext) -> None:
        self.booked.discard(command.data["what"])
        print("unbook", command.data["what"])

    @handler("travel", "Charge")
    async def charge(self, command: Command, ctx: HandlerContext) -> None:
        raise BusinessRuleError("The card was declined.", code="DECLINED")


def booking(what: str) -> Stage:
    return Stage(
        what,
        [BatchCommand("Book", data={"what": what})],
        compensate=BatchCommand("Unbook", data={"what": what}),
    )


async def main() -> None:
    async with bus:
        await bus.migrate()
        bus.register(Travel())
        stages = [booking("flight"), booking("hotel"), Stage("payment", [BatchCommand("Charge")])]
        job_id = await bus.jobs.create("travel", stages, name="Trip")
        async with Worker(bus, domains=["travel"]):
            job = await bus.jobs.wait("travel", job_id, timeout=30)
        print(f"{job.name} is {job.status}, failures of its compensation: {job.compensation_failures}")


if __name__ == "__main__":
    asyncio.run(main())
