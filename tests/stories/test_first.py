from busload import CommandBus, BatchStatus
from tests.given import Given

async def test_a_batch_runs_to_its_end(bus: CommandBus, given: Given) -> None:
    given.handler()
    batch_id = await given.batch(commands=2500)
    assert await given.drained() == 2500
    batch = await bus.get_batch("payments", batch_id)
    assert batch is not None and batch.status == "COMPLETED"
    given.database.check_invariants()
