"""A job of three stages: extract, fan out by what was found, fan in to a report. It survives every crash in between.

python examples/nightly_job.py
"""

from __future__ import annotations

import asyncio

from busload import BatchCommand, Command, CommandBus, HandlerContext, Stage, Worker
from busload.jobs import FinishedStage

bus = CommandBus()

ORDERS = {"north": [120, 80], "south": [40], "west": [300, 5, 5]}


@bus.handler("reports", "Extract")
async def extract(command: Command, ctx: HandlerContext) -> dict[str, object]:
    return {"orders": ORDERS[command.data["region"]]}


@bus.planner("reports", "rate")
async def rate_each_order(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
    """Fan out: one command for each order that the stage before has found."""
    return [
        BatchCommand("Rate", data={"region": found.data["region"], "amount": amount})
        async for found in finished.results()
        for amount in found.result["orders"]
    ]


@bus.handler("reports", "Rate")
async def rate(command: Command, ctx: HandlerContext) -> dict[str, object]:
    return {"large": command.data["amount"] >= 100}


@bus.planner("reports", "report")
async def report_all(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
    """Fan in: one command for all of them."""
    large = [found.data async for found in finished.results() if found.result["large"]]
    return [BatchCommand("Report", data={"large": large})]


@bus.handler("reports", "Report")
async def report(command: Command, ctx: HandlerContext) -> None:
    for order in command.data["large"]:
        print(f"Large: {order['amount']} in the {order['region']}")


async def main() -> None:
    async with bus:
        await bus.migrate()
        regions = [BatchCommand("Extract", data={"region": region}) for region in ORDERS]
        job_id = await bus.jobs.create(
            "reports", [Stage("extract", regions), Stage("rate"), Stage("report")], name="Nightly"
        )
        await Worker(bus).drain()
        job = await bus.jobs.wait("reports", job_id, timeout=30)
        for stage in job.stages:
            print(f"{stage.name}: {stage.status}, commands: {stage.batch.completed_count if stage.batch else 0}")
        print(f"{job.name} is {job.status}")


if __name__ == "__main__":
    asyncio.run(main())
