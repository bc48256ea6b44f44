"""Stream a CSV into a batch, row by row, while a worker runs what has arrived, and show progress.

    python examples/bulk_import.py

The file is never held in memory: rows leave in checkpoints of 1,000, each a transaction of its own, and run at once.
The batch cannot complete before it is sealed, which is when the `async with` block ends.
"""

from __future__ import annotations

import asyncio
import csv
import tempfile
from pathlib import Path
from uuid import UUID

from busload import BusinessRuleError, Command, CommandBus, HandlerContext, Worker

ROWS = 5000

bus = CommandBus()


@bus.handler("crm", "ImportContact")
async def import_contact(command: Command, ctx: HandlerContext) -> None:
    if "@" not in command.data["email"]:
        raise BusinessRuleError("This is not an address.", code="BAD_EMAIL")  # final: counted as failed, not retried


def write_csv(path: Path) -> None:
    """A file to import; every thousandth row is wrong."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "email"])
        for n in range(1, ROWS + 1):
            writer.writerow([f"Contact {n}", f"contact{n}" if n % 1000 == 0 else f"contact{n}@example.com"])


async def show_progress(batch_id: UUID) -> None:
    async for batch in bus.watch_batch("crm", batch_id):
        print(f"{batch.status:<25} {batch.finished_count:>6} of {batch.total_count:>6}, {batch.failed_count} failed")


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "contacts.csv"
        write_csv(path)
        async with bus:
            await bus.migrate()
            async with Worker(bus):
                with path.open(newline="") as file:
                    async with bus.open_batch("crm", name=path.name, checkpoint_size=1000) as batch:
                        progress = asyncio.create_task(show_progress(batch.batch_id))
                        for row in csv.DictReader(file):
                            await batch.add("ImportContact", row)
                await progress

            for failed in await bus.list_batch_commands("crm", batch.batch_id, status="FAILED", limit=2):
                print(f"{failed.data['name']}: {failed.last_error_code}, {failed.last_error_message}")


if __name__ == "__main__":
    asyncio.run(main())
