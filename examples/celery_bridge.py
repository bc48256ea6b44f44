"""Tasks of a Celery app that go through busload: two lines more, and not one changed in the tasks or in the calls.

    python examples/celery_bridge.py

There is no broker here. A team that moves step by step has one, and lets some tasks stay with it.
"""

from __future__ import annotations

import asyncio

from celery import Celery, Task

from busload import Worker
from busload.errors import CommandFailedError, InvalidOperationError
from busload.integrations.celery import CeleryBridge
from busload.integrations.self_opening_bus import SelfOpeningBus

app = Celery("celery_bridge", broker="amqp://nowhere")
app.conf.task_default_queue = "greetings"


@app.task(bind=True, max_retries=3)
def remind(self: Task, customer: str) -> str:
    if self.request.retries < 2:
        raise self.retry(countdown=0, exc=ConnectionError("The mail server did not answer."))
    return f"{customer} is reminded, at attempt {self.request.retries + 1}"


@app.task(autoretry_for=(ConnectionError,))
def block(customer: str) -> None:
    raise LookupError(f"{customer} is nobody's name")


bus = SelfOpeningBus()
bridge = CeleryBridge(app, bus)  # from here on, what is sent is a command
bridge.register()  # and workers of this bus run the tasks


def main() -> None:
    bus.migrate()
    reminded, blocked = remind.delay("Ada"), block.apply_async(("Nobody",), priority=5)
    print(f"Ada: {reminded.state}")

    # In an application this is another process: `busload worker examples.celery_bridge:bus`.
    asyncio.run(Worker(bus).drain())

    print(reminded.get(timeout=30))
    try:
        blocked.get(timeout=30)
    except CommandFailedError as error:
        print(f"Nobody: {error.status}, {error.error_type}: {error.error_message}")
    for one in bus.troubleshooting.list("greetings"):
        bus.troubleshooting.cancel("greetings", one.command_id, operator="rosa", reason="nobody's name")
    try:
        (remind.s("Ada") | block.si("Ada")).delay()
    except InvalidOperationError as error:
        print(f"Refused: {error}")
    bus.close()


if __name__ == "__main__":
    main()
