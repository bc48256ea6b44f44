"""Create a batch: a form, a preview that checks everything, and the creation of exactly what was previewed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from busload.commands.ids import new_id
from busload.commands.wording import counted
from busload.dashboard import asked, draft
from busload.dashboard.access import Permission
from busload.dashboard.draft import Draft, WrongDraft
from busload.dashboard.problem import Problem, wrong_input
from busload.dashboard.render import bus_of, principal_of, render, tree, url
from busload.dashboard.route import action, page
from busload.errors import BusloadError

SAMPLE = 3
"""Commands that a preview shows."""


async def form(request: Request) -> Response:
    if not principal_of(request).may(Permission.OPERATE):
        raise Problem(403, "Only for operators", "Readers create nothing.", "Ask an operator, or for the role of one.")
    return _page(request, {"batch_id": str(new_id()), "domain": asked.text(request, "domain") or ""})


async def preview(request: Request) -> Response:
    fields = await _fields(request)
    try:
        return _page(request, fields, draft.read(fields, bus_of(request).settings.limits))
    except WrongDraft as wrong:
        return _page(request, fields, problems=wrong.problems, total=wrong.total)


async def create(request: Request) -> Response:
    """Create what was previewed. Whoever sends the same form twice has created it once."""
    fields = await _fields(request)
    try:
        found = draft.read(fields, bus_of(request).settings.limits)
    except WrongDraft as wrong:
        return _page(request, fields, problems=wrong.problems, total=wrong.total)
    if fields.get("previewed") != found.digest:
        said = "Nothing was created: the form has changed since its preview. This is the preview of what it says now."
        return _page(request, fields, found, notice=said)
    by = principal_of(request).name
    found.options["custom_data"], found.options["operator"] = {"created_by": by}, by
    batch_id = UUID(fields["batch_id"])
    try:
        await bus_of(request).create_batch(found.domain, found.commands, on_complete=found.callback, **found.options)
    except BusloadError:
        if await bus_of(request).get_batch(found.domain, batch_id) is None:  # else the form was sent twice
            raise
    return Response(status_code=204, headers={"HX-Redirect": url(request, "batch", batch_id=batch_id)})


async def _fields(request: Request) -> Mapping[str, str]:
    fields = await asked.form(request)
    try:
        UUID(fields.get("batch_id", ""))
    except ValueError:
        raise wrong_input("The form is not whole.", "Open the page again, and fill it in.") from None
    return fields


def _page(
    request: Request,
    fields: Mapping[str, str],
    found: Draft | None = None,
    *,
    problems: Sequence[str] = (),
    total: int = 0,
    notice: str | None = None,
) -> Response:
    return render(
        request,
        "new_batch.html",
        title="Create a batch",
        status=400 if problems else 200,
        fields={name: fields.get(name, "") for name in draft.FIELDS},
        found=found,
        count=counted(len(found.commands), "command") if found else "",
        sample=[(one.command_type, tree(request, one.data)) for one in found.commands[:SAMPLE]] if found else [],
        problems=problems,
        more=total - len(problems),
        most=draft.MOST_COMMANDS,
        kibibytes=draft.MOST_TEXT // 1024,
        notice=notice,
    )


PATH = "/batches/new"
ROUTES = (
    page("batch.new", PATH, form, Permission.READ),
    action("batch.preview", f"{PATH}/preview", preview, Permission.OPERATE, most_body=draft.MOST_BODY),
    action("batch.create", f"{PATH}/create", create, Permission.OPERATE, most_body=draft.MOST_BODY),
)
"""Only where creating is allowed: `app(bus, create=True)`."""
