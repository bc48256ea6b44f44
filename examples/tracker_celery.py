"""Track the tasks of a Celery app that exists already: a base class and a few signals, not a line in the tasks.
AMQP_URL=amqp://localhost python examples/tracker_celery.py"""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

from celery import Celery, Task, exceptions, signals

from busload import Dedup, Execution, PermanentCommandError, SyncCommandBus, SyncTaskTracker

tracker = SyncTaskTracker(SyncCommandBus().open())  # a forked child is a worker with a bus of its own
running: dict[str, Execution] = {}
EXISTING = Dedup(on_conflict="return_existing")


class Tracked(Task):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if keys := (self.request.headers or {}).get("busload"):  # none: called directly, or not enqueued
            if (execution := tracker.claim(*keys)) is None:
                raise exceptions.Ignore  # it runs elsewhere or has ended: this message is one too many
            running[self.request.id] = execution
        return super().__call__(*args, **kwargs)


@signals.before_task_publish.connect  # whatever a signal raises, Celery logs it and goes on
def enqueue(body: Any, headers: dict[str, Any], routing_key: str, **_: Any) -> None:
    if "busload" not in headers:
        call = {"name": (name := headers["task"]), "args": (args := body[0]), "kwargs": (kwargs := body[1])}
        readable = not kwargs and all(type(one) in (str, int, UUID) and 0 < len(str(one)) < 65 for one in args)
        canonical = json.dumps([args, kwargs], sort_keys=True, default=str)
        task_id = tracker.task_id(routing_key, name, *(args if readable else [uuid5(NAMESPACE_OID, canonical)]))
        retries = getattr(app.tasks.get(name), "max_retries", 3)
        attempts = 32767 if retries is None else min(retries + 1, 32767)
        if one := tracker.enqueue(task_id, queue=routing_key, metadata=call, dedup=EXISTING, max_attempts=attempts):
            headers["busload"] = [task_id, str(one.execution_id)]
    elif execution := running.pop(headers["id"], None):  # a retry: it has failed, before its message goes round again
        tracker.fail(execution, sys.exc_info()[1] or "It asked for a retry.")


@signals.task_postrun.connect
def end(task_id: str, state: str, retval: Any, **_: Any) -> None:
    if one := running.pop(task_id, None):  # else it was untracked, ignored or retried; if it failed, Celery gives up
        tracker.complete(one, retval) if state == "SUCCESS" else tracker.fail(one, PermanentCommandError(str(retval)))


def recover(waiting_for: timedelta) -> None:  # an application calls it every minute, with five of them
    for one in tracker.recover("dev_renders", waiting_for=waiting_for):
        app.send_task(**one.metadata, headers={"busload": [one.task_key, str(one.execution_id)]})


signals.worker_process_shutdown.connect(lambda **_: tracker.close(), weak=False)
app = Celery("tracker_celery", broker=os.environ.get("AMQP_URL", "amqp://localhost"), task_cls=Tracked)
app.conf.update(task_default_queue="dev_renders", task_acks_late=True, task_ignore_result=True)


@app.task(bind=True)
def render(self: Task, report: str) -> str:
    if report == "March" and self.request.retries == 0:
        raise self.retry(countdown=0)
    return {"January": "1.pdf", "February": "2.pdf", "March": "3.pdf"}[report]


if __name__ == "__main__":
    enqueue((["February"], {}), {"task": render.name}, "dev_renders")  # and its message is lost
    recover(waiting_for=timedelta(0))
    sent = [render.delay(report) for report in ("January", "January", "March", "void")]
    worker = [sys.executable, "-m", "celery", "-qA", "tracker_celery", "worker", "--concurrency=2", "-l", "CRITICAL"]
    with subprocess.Popen(worker, cwd=sys.path[0]) as process:
        for name in (tracker.task_id("renders", render.name, one) for one in ("January", "February", "March", "void")):
            while (chain := tracker.history(name))[-1].status not in ("completed", "dlq") and process.poll() is None:
                time.sleep(0.1)
            print(name, *(one.status for one in chain))
        process.terminate()
