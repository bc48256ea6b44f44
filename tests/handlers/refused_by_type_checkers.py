"""Calls that mypy and pyright refuse. Each has an ignore, and both complain of an ignore that is not needed.

`scripts/check_examples.py` has pyright check it; mypy checks it with all tests. Nobody runs it.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from dataclasses import dataclass

from busload import Chunk, ChunkContext, Command, CommandBus, HandlerContext, SyncCommandBus, SyncHandlerContext

bus, sync_bus = CommandBus(), SyncCommandBus()


@dataclass
class Debit:
    account: int


@bus.command("payments", "Fields")
async def fields(ctx: HandlerContext, account: int, *, amount: int = 5) -> int:
    return account + amount


@bus.command("payments", "Model")
async def model(data: Debit, ctx: HandlerContext) -> int:
    return data.account


@bus.command("payments", "Command")
async def typed_command(command: Command[Debit], ctx: HandlerContext) -> str:
    return command.data.account  # type: ignore[return-value]


@sync_bus.command("payments", "Thread")
def in_thread(ctx: SyncHandlerContext, account: int) -> int:
    return account


@bus.bulk_handler("payments", "Chunk")
async def chunk(chunk: Chunk[Debit], ctx: ChunkContext) -> None:
    for item in chunk:
        item.data.amount  # type: ignore[attr-defined]  # noqa: B018


async def send(ctx: HandlerContext, thread: SyncHandlerContext) -> None:
    await fields.send(account=1, amount=2)
    await fields.send(1)
    await fields.send()  # type: ignore[call-arg]
    await fields.send("1")  # type: ignore[arg-type]
    await fields.send(1, 2)  # type: ignore[call-arg]
    await fields.send(accout=1)  # type: ignore[call-arg]
    fields.command(account="1")  # type: ignore[arg-type]
    await fields.options(colour="red").send(1)  # type: ignore[call-arg]
    one: int = await fields(ctx, 1)
    two: str = await fields(ctx, 1)  # type: ignore[assignment]
    await fields(1)  # type: ignore[call-arg, arg-type]
    await model.send(Debit(1))
    await model.send({"account": 1})  # type: ignore[arg-type]
    await typed_command.send(Debit(1))
    await typed_command.send(1)  # type: ignore[arg-type]
    in_thread.send(account=1)
    in_thread.send(account="1")  # type: ignore[arg-type]
    three: int = in_thread(thread, 1)
    print(one, two, three)
