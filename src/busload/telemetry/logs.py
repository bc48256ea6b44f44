"""Log lines of handlers say which command they are about, as text and as JSON; any logger, awaited or in a thread."""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from busload.telemetry.running import Attempt, running

TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-")


class CommandFields(logging.Filter):
    """Gives each record that a handler logs the fields of its command. Add it to the handlers of logging.

    The fields are `NAMES`; those that a command has not are left out, and so are all of them outside of a handler. A
    record that has a field of that name already, by `extra`, keeps its own.
    """

    NAMES: ClassVar = (
        *("command_id", "command_type", "domain", "batch_id", "task_key", "attempt", "execution_id"),
        *("commands", "trace_id"),
    )

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, with its fields."""
        if (what := running.get()) is not None:
            own = vars(record)
            for name, value in fields_of(what).items():
                own.setdefault(name, value if isinstance(value, int) else str(value))
        return True


def fields_of(what: Attempt) -> dict[str, Any]:
    """What a log line says about a command, or about the commands of a chunk."""
    trace_id = _trace_id(what)
    return {**what.facts()} if trace_id is None else {**what.facts(), "trace_id": trace_id}


def _trace_id(what: Attempt) -> str | None:
    """The trace of this moment or, in a process without OpenTelemetry, the trace that the command was sent in."""
    spans = sys.modules.get("busload.telemetry.opentelemetry")
    here: str | None = None if spans is None else spans.trace_id_here()
    return trace_id_of(what.traceparent()) if here is None else here


def trace_id_of(traceparent: str | None) -> str | None:
    """The id of the trace that a header names, as W3C writes it; None if it names none."""
    found = TRACEPARENT.match(traceparent or "")
    return found[1] if found else None


def set_up_logging(level: str, *, as_json: bool) -> None:
    """The library logs and leaves it to programs where that goes; this program writes it to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(CommandFields())
    handler.setFormatter(JsonLines() if as_json else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextLines(logging.Formatter):
    """A line of text; the fields of a command follow the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(process)d %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line, own = super().formatMessage(record), vars(record)
        fields = [f"{name}={_one_word(own[name])}" for name in CommandFields.NAMES if name in own]
        return f"{line}  [{' '.join(fields)}]" if fields else line


def _one_word(value: object) -> str:
    """A value that cannot be taken for another field or another line."""
    text = str(value)
    return text if re.fullmatch(r"[\w.:/@+-]+", text) else ascii(text)


class JsonLines(logging.Formatter):
    """One object a line: the usual fields, whatever was given as `extra`, and the traceback as `exception`."""

    _USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {name: value for name, value in vars(record).items() if name not in self._USUAL}
        line |= {
            "at": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_text:
            line["exception"] = record.exc_text
        elif record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except Exception:  # a lone surrogate, or an `extra` that is no JSON at all: better as text than not at all
            return msgspec.json.encode({name: ascii(value) for name, value in line.items()}).decode()
