"""Workers: who serves which domains, how they are, what each of them runs, and how to stop one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from starlette.requests import Request
from starlette.responses import Response

from busload.commands.wording import span
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.filter import Filter
from busload.dashboard.problem import no_such_page, not_found, wrong_input
from busload.dashboard.render import bus_of, cli, number, principal_of, render, words
from busload.dashboard.route import Live, action, page
from busload.health.workers import NUMBERS, HeldCommand, KnownWorker

LIMIT = 50
RUNNING = ("ALIVE", "STOPPING", "SILENT")
"""States of a worker that has not stopped."""


async def _listed(request: Request) -> tuple[Filter, str | None, list[KnownWorker]]:
    """The workers of a page, and one more if there is a next page."""
    wanted, after = Filter.of(request, domain=asked.text, all=asked.flag), asked.text(request, "after")
    if after is not None and not (after.isascii() and after.isdecimal() and int(after) in NUMBERS):
        raise wrong_input(f"The page begins at {after!r:.80}, which is no worker.", "Begin with the first page.")
    found = await bus_of(request).workers.list(
        wanted["domain"],
        stopped_too=wanted["all"] is not None,
        after=None if after is None else int(after),
        limit=LIMIT + 1,
    )
    if not found and after is not None:
        raise no_such_page()
    return wanted, after, found


async def list_page(request: Request) -> Response:
    wanted, after, found = await _listed(request)
    shown, more = found[:LIMIT], len(found) > LIMIT
    return render(
        request,
        "workers.html",
        title="Workers",
        workers=shown,
        live=_values(shown),
        cli=cli("worker", "ls", *wanted.words),
        **wanted.shown(request, "workers", after=after, next=shown[-1].worker if more else None),
    )


async def live_list(request: Request) -> Live:
    return _values((await _listed(request))[-1][:LIMIT])


def _values(workers: Sequence[KnownWorker]) -> Live:
    values: dict[str, str | list[str]] = {"rows": [str(worker.worker) for worker in workers]}
    for worker in workers:
        values |= _of(worker, f"{worker.worker}.")
    return values


def _of(worker: KnownWorker, prefix: str = "") -> dict[str, str]:
    """The live values of one worker."""
    assert worker.at is not None
    return {
        f"{prefix}state": words(worker.state),
        f"{prefix}state.code": worker.state,
        f"{prefix}running": number(worker.commands),
        f"{prefix}seen": f"{span(max(worker.at - worker.seen_at, timedelta(0)))} ago",
        f"{prefix}wrong": "; ".join(reason.message for reason in worker.reasons) or "–",
    }


async def _worker(request: Request) -> KnownWorker:
    wanted: int = request.path_params["worker"]
    found = await bus_of(request).workers.get(wanted)
    if found is None:
        raise not_found(
            f"There is no worker with the number {wanted}.",
            "See the list of workers, and which database the dashboard uses.",
        )
    return found


async def show(request: Request, notice: str | None = None) -> Response:
    worker = await _worker(request)
    held = await bus_of(request).workers.running(worker.worker, limit=LIMIT)
    return render(
        request,
        "worker.html",
        title=worker.name,
        worker=worker,
        runs=worker.state in RUNNING,
        stoppable=worker.state in ("ALIVE", "SILENT") and worker.concurrency > 0 and not worker.stop_requested_at,
        held=held,
        limit=LIMIT,
        live=_one(worker, held),
        cli=cli("worker", "ls", *([] if worker.state in RUNNING else ["--all"])),
        notice=notice,
    )


async def live(request: Request) -> Live:
    worker = await _worker(request)
    return _one(worker, await bus_of(request).workers.running(worker.worker, limit=LIMIT))


def _one(worker: KnownWorker, held: Sequence[HeldCommand]) -> Live:
    assert worker.at is not None
    values: dict[str, str | list[str]] = {**_of(worker), "rows": [str(one.command_id) for one in held]}
    for one in held:
        values[f"{one.command_id}.since"] = span(max(worker.at - one.since, timedelta(0)))
    return values


async def stop(request: Request) -> Response:
    reason = asked.required(await asked.form(request), "reason")
    worker = await _worker(request)
    operator = principal_of(request).name
    stopped = await bus_of(request).workers.stop(worker.worker, reason=reason, operator=operator)
    return await show(
        request, "Asked to stop. What runs finishes within its grace time." if stopped else "It was asked before."
    )


PATH = "/workers/{worker:int}"
ROUTES = (
    page("workers", "/workers", list_page, Permission.READ, label="Workers", live=live_list),
    page("worker", PATH, show, Permission.READ, live=live),
    action("worker.stop", f"{PATH}/stop", stop, Permission.OPERATE),
)
