"""Track the tasks of a Celery app that exists already: a base class and a few signals, not a line in the tasks.

AMQP_URL=amqp://localhost python examples/tracker_celery.py"""

import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

from celery import Celery, Task, exceptions, signals

from busload import Dedup, Execution, PermanentCommandError, SyncCommandBus, SyncTaskTracker

EXISTING = Dedup(on_conflict="return_existing")
tracker = SyncTaskTracker(SyncCommandBus().open())  # a forked child is a worker with a bus of its own
running: dict[str, Execution] = {}


class Tracked(Task):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (execution := tracker.claim(*self.request.headers["busload"])) is None:
            raise exceptions.Ignore  # it runs elsewhere or has ended: this message is one too many
        running[self.request.id] = execution
        return super().__call__(*args, **kwargs)


@signals.before_task_publish.connect
def enqueue(body: Any, headers: dict[str, Any], routing_key: str, **_: Any) -> None:
    if "busload" not in headers:
        task_id = tracker.task_id(routing_key, headers["task"], *body[0])
        queued = tracker.enqueue(task_id, queue=routing_key, metadata={"args": body[0]}, dedup=EXISTING)
        headers["busload"] = [task_id, str(queued and queued.execution_id)]
    elif execution := running.pop(headers["id"], None):  # a retry: it has failed, before its message goes round again
        tracker.fail(execution, sys.exc_info()[1] or "It asked for a retry.")


@signals.task_success.connect
def complete(sender: Task, result: Any, **_: Any) -> None:
    tracker.complete(running.pop(sender.request.id), result)


@signals.task_failure.connect
def fail(task_id: str, exception: BaseException, **_: Any) -> None:
    if execution := running.pop(task_id, None):
        tracker.fail(execution, PermanentCommandError(str(exception)))  # Celery has given up


def recover(waiting_for: timedelta) -> None:  # an application calls it every minute, with five of them
    for one in tracker.recover("dev_reports", waiting_for=waiting_for):
        render.apply_async(one.metadata["args"], headers={"busload": [one.task_key, str(one.execution_id)]})


signals.worker_process_shutdown.connect(lambda **_: tracker.close(), weak=False)
app = Celery("tracker_celery", broker=os.environ.get("AMQP_URL", "amqp://localhost"), task_cls=Tracked)
app.conf.update(task_default_queue="dev_reports", task_acks_late=True, task_ignore_result=True)


@app.task(bind=True)
def render(self: Task, report: str) -> str:
    if report == "March" and self.request.retries == 0:
        raise self.retry(countdown=0)
    return {"January": "1.pdf", "February": "2.pdf", "March": "3.pdf"}[report]


if __name__ == "__main__":
    february = tracker.task_id("dev_reports", render.name, "February")
    tracker.enqueue(february, queue="dev_reports", metadata={"args": ["February"]})  # and its message is lost
    recover(waiting_for=timedelta(0))
    sent = [render.delay(report) for report in ("January", "January", "March", "void")]
    worker = [sys.executable, "-m", "celery", "-qA", "tracker_celery", "worker", "--concurrency=2", "-l", "CRITICAL"]
    with subprocess.Popen(worker, cwd=sys.path[0]) as process:
        for report in ("January", "February", "March", "void"):
            name = tracker.task_id("dev_reports", render.name, report)
            while (chain := tracker.history(name))[-1].status not in ("completed", "dlq") and process.poll() is None:
                time.sleep(0.1)
            print(name, *(one.status for one in chain))
        process.terminate()
