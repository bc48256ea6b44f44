"""What went wrong, for people: a status, what happened and what to do. Payloads and DSNs are never part of it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping

import psycopg
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from busload.dashboard.render import render
from busload.errors import (
    BatchNotFoundError,
    BusloadError,
    CommandNotFoundError,
    DatabaseUnavailableError,
    DatabaseUnusableError,
    InvalidCommandError,
    InvalidOperationError,
    JobNotFoundError,
    LockWaitTimeoutError,
    OutcomeUnknownError,
    PartlyDoneError,
    ScheduleNotFoundError,
    SchemaOutdatedError,
)

log = logging.getLogger("busload")

READ_ONLY = (psycopg.errors.ReadOnlySqlTransaction,)
MISSING = (
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.UndefinedTable,
)
"""What PostgreSQL says where a schema that was there has been dropped or replaced since."""
NOT_FOUND = (BatchNotFoundError, CommandNotFoundError, JobNotFoundError, ScheduleNotFoundError)
HALF_KNOWN = (OutcomeUnknownError, PartlyDoneError)


class Problem(Exception):  # noqa: N818 - it is shown, not only raised
    """A page that says what happened and what to do. Raise it in a handler to show it."""

    def __init__(
        self, status: int, title: str, happened: str, todo: str, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(title)
        self.status, self.title, self.happened, self.todo = status, title, happened, todo
        self.headers = headers or {}


def problem_page(request: Request, problem: Problem) -> Response:
    response = render(request, "problem.html", title=problem.title, problem=problem, status=problem.status)
    response.headers.update(problem.headers)
    return response


def wrong_input(what: str, wanted: str) -> Problem:
    """A filter, a form or a cursor that cannot be."""
    return Problem(400, "Wrong input", what, wanted)


def not_found(happened: str, todo: str) -> Problem:
    return Problem(404, "Not found", happened, todo)


def no_such_page() -> Problem:
    """A cursor behind the last row."""
    return Problem(
        404,
        "Past the end",
        "There is nothing on this page of the list: it begins behind the last row, or at a row that is gone.",
        "Go back to the first page of the list.",
    )


def as_problem(error: BaseException, where: str) -> Problem:
    """What an error means for the person who sees it."""
    said = " ".join(str(error).split())
    match error:
        case Problem():
            return error
        case HTTPException(status_code=405):
            return Problem(405, "Not done this way", "This address does not take such a request.", "Use the pages.")
        case HTTPException(status_code=status):
            return Problem(status, "Not found", "There is no page at this address.", "Choose one on the left.")
        case TimeoutError():
            return Problem(
                503,
                "No answer in time",
                "PostgreSQL did not answer in time: it is busy, or away. The dashboard has ended its statement: no "
                "page may hurt the queue.",
                "Narrow the filter, or try again later; `busload health` says whether PostgreSQL is there. An action "
                "that was under way may have happened: look before you repeat it.",
            )
        case _ if isinstance(error, NOT_FOUND):
            return Problem(404, "Not found", said, "It may be in another domain, or was removed as old.")
        case InvalidCommandError():
            return Problem(400, "Wrong input", said, "Correct it and try again.")
        case InvalidOperationError():
            return Problem(409, "Not possible now", said, "Look at its state, which may have changed meanwhile.")
        case SchemaOutdatedError(found=0):
            return Problem(503, "There is no schema yet", said, "Run `busload schema migrate`, and reload this page.")
        case SchemaOutdatedError():
            return Problem(503, "The schema is too old", said, "Run `busload schema migrate`, and reload this page.")
        case LockWaitTimeoutError():
            return Problem(409, "Somebody else holds it", said, "Try again when that transaction has ended.")
        case _ if isinstance(error, HALF_KNOWN):
            return Problem(503, "Perhaps done", said, "Look at the page of what you have changed before you repeat it.")
        case _ if isinstance(error, READ_ONLY):
            return Problem(
                503,
                "The database is read-only",
                "PostgreSQL takes no changes: it is a standby, or was set read-only. Nothing was done.",
                "Point the dashboard at the primary server, or wait until the server takes changes again.",
            )
        case _ if isinstance(error, MISSING):
            return Problem(
                503,
                "The schema is not whole",
                "Something that busload needs is missing in the database: its schema was dropped, restored or changed "
                "while the dashboard ran.",
                "Run `busload doctor` where the dashboard runs: it says what is missing, and how to make it again.",
            )
        case psycopg.errors.InsufficientPrivilege():
            return Problem(
                403,
                "Not allowed by PostgreSQL",
                "The database role of the dashboard lacks a right that this needs. Nothing was done.",
                "Grant it the rights of an operator, or use another role in BUSLOAD_DATABASE_URL.",
            )
        case DatabaseUnusableError():
            return Problem(
                503,
                "The database cannot be used",
                "PostgreSQL is there, but busload cannot use it as it is.",
                "Run `busload health` where the dashboard runs: it says why.",
            )
        case psycopg.errors.QueryCanceled():
            return as_problem(TimeoutError(), where)
        case DatabaseUnavailableError() | psycopg.OperationalError() | ConnectionError():
            return Problem(
                503,
                "The database is away",
                "PostgreSQL cannot be reached now, or does not answer. Workers wait for it, and nothing is lost.",
                "Run `busload health` where the dashboard runs: it says why. The page works when PostgreSQL does.",
            )
        case BusloadError():
            return Problem(409, "Not done", said, "Look at its state, and try again.")
    # Only where it happened: the text of an unknown error may hold a payload.
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("The dashboard failed at %s with %s:\n%s", where, type(error).__name__, frames)
    return Problem(
        500,
        "The dashboard failed",
        f"It did not expect a {type(error).__name__} here. Nothing is known to be wrong with the bus itself.",
        "Look at the log of the dashboard, and report it. The command line does the same as this page.",
    )
