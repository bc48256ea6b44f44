"""How `busload top` looks: lines that fit the terminal, whatever its size, and what a person has chosen on them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from busload.batches.batch import BatchMetadata
from busload.cli.health import STYLES as HEALTH
from busload.cli.output import joined, shown, wrapped
from busload.cli.top_frame import Cause, Frame
from busload.commands.wording import counted, span
from busload.health.health import HealthState
from busload.health.workers import KnownWorker
from busload.limits.pause import DomainOverview

SECTIONS = ("domains", "batches", "causes")
"""What a person can choose from, in the order of the Tab key."""
SPARE = {
    "domains": ("OUTBOX", "SCHEDULED", "WORKERS"),
    "batches": ("DOMAIN", "TROUBLE", "TOTAL", "RATE", "PROGRESS"),
    "causes": ("DOMAIN", "NEWEST"),
    "workers": ("SEEN", "SLOTS"),
}
"""Columns that a narrow terminal goes without, in this order."""
LAST = 24
"""Characters that the last column of a section should have."""
BAR = 12
LEAST_WIDTH, LEAST_HEIGHT = 20, 4
KEYS = "q quit  tab section  ↑↓ choose  p pause  r retry  e explain  ? help"
HELP = (
    "tab, shift-tab   go to the next or previous section",
    "up, down (j, k)  choose a row of it",
    "p                pause the chosen domain, or resume it",
    "r                retry all commands that wait for the chosen cause; asks first",
    "e                explain the chosen batch: why it is not finished",
    "space            look again now",
    "?                this help",
    "q                quit",
)


@dataclass
class View:
    """What a person has chosen, and what is open above the lists."""

    section: str = "batches"
    chosen: dict[str, Hashable] = field(default_factory=dict)
    """The key of the chosen row of each section."""
    places: dict[str, int] = field(default_factory=dict)
    """Where that row was when it was last seen: if it goes, the row that is there then is the chosen one."""
    visible: frozenset[str] = frozenset()
    """Sections that the terminal had room for."""
    said: str = ""
    """What the last key has done."""
    sheet: tuple[str, Sequence[str]] | None = None
    """A title and lines that are shown instead of the lists."""
    question: str | None = None

    def choose(self, frame: Frame, section: str) -> int | None:
        """The index of the chosen row; None if the section is empty."""
        keys = [key_of(row) for row in rows_of(frame, section)]
        if not keys:
            return None
        if (key := self.chosen.get(section)) in keys:
            at = keys.index(key)
        else:
            at = min(self.places.get(section, 0), len(keys) - 1)
        self.chosen[section], self.places[section] = keys[at], at
        return at

    def move(self, frame: Frame, steps: int) -> None:
        at, rows = self.choose(frame, self.section), rows_of(frame, self.section)
        if at is not None:
            at = max(0, min(at + steps, len(rows) - 1))
            self.chosen[self.section], self.places[self.section] = key_of(rows[at]), at

    def turn(self, steps: int) -> None:
        """Go to another section."""
        self.section = SECTIONS[(SECTIONS.index(self.section) + steps) % len(SECTIONS)]


def rows_of(frame: Frame, section: str) -> Sequence[DomainOverview | BatchMetadata | Cause]:
    if section == "domains":
        return frame.overview.domains
    return frame.batches if section == "batches" else frame.causes


def key_of(row: DomainOverview | BatchMetadata | Cause) -> Hashable:
    match row:
        case DomainOverview():
            return row.domain
        case BatchMetadata():
            return row.batch_id
        case _:
            return row.key


def draw(frame: Frame | None, view: View, width: int, height: int, trouble: str | None = None) -> list[Text]:
    """As many lines as the terminal has, none wider than it."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        lines = [Text("Too small. q quits.")]
    elif frame is None:
        lines = [Text(shown(trouble) if trouble else "Looking at the database …", "red" if trouble else "")]
    else:
        lines = _frame(frame, view, width, height, trouble)
    lines = lines[:height] + [Text("")] * (height - len(lines))
    if width >= LEAST_WIDTH and height >= LEAST_HEIGHT:
        lines[-1] = _last_line(view)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return lines


def whole(frame: Frame) -> list[Text]:
    """A frame on lines that are as long as it takes, for a pipe or `--once`."""
    lines = [*_head(frame, None), Text("")]
    for section in (*SECTIONS, "workers"):
        lines += [*_table(frame, section, None, None), Text("")]
    return lines[:-1]


def _frame(frame: Frame, view: View, width: int, height: int, trouble: str | None) -> list[Text]:
    head = _head(frame, trouble)
    room = height - len(head) - 1
    if view.sheet is not None:
        title, texts = view.sheet
        body = [part for text in map(shown, texts) for part in (wrapped(text, width) if text else [""])]
        lines = [Text(""), Text(title, "bold"), *map(Text, body)]
        if len(lines) > room:
            lines = [*lines[: room - 1], Text(f"… {len(lines) - room + 1} more lines", "dim")]
        return head + lines
    shares = _shares(frame, view, room)
    view.visible = frozenset(section for section, rows in shares.items() if rows)
    lines = head
    for section, rows in shares.items():
        if rows:
            lines += [Text(""), *_table(frame, section, view, rows, width)]
    return lines


def _shares(frame: Frame, view: View, room: int) -> dict[str, int]:
    """How many rows of each section there is room for. The section in which a person chooses comes first."""
    order = [view.section, *(each for each in (*SECTIONS, "workers") if each != view.section)]
    wanted = {each: max(1, _count(frame, each)) for each in order}
    shares = dict.fromkeys(order, 0)
    for least in (1, 3, 10**6):  # a row for each, then a few, then all that fit
        for section in order:
            more = min(wanted[section], least) - shares[section]
            costs = 0 if shares[section] else 2  # an empty line and the heading
            given = max(0, min(more, room - costs))
            if given:
                shares[section] += given
                room -= given + costs
    return {each: shares[each] for each in (*SECTIONS, "workers")}


def _count(frame: Frame, section: str) -> int:
    return len(frame.workers) if section == "workers" else len(rows_of(frame, section))


def _head(frame: Frame, trouble: str | None) -> list[Text]:
    now = frame.overview
    state = frame.health.state
    sent, ended = ("–", "–") if frame.rates is None else (f"{rate:,.0f}/s" for rate in frame.rates)
    title = Text.assemble(
        ("busload top  ", "bold"),
        (state.value, f"bold {HEALTH[state]}"),
        f"  in {sent}  out {ended}  {shown(now.at).partition('.')[0]}",
    )
    places = [
        f"ready {now.ready:,}" + (f", oldest {_age(now.oldest_ready, now.at)}" if now.oldest_ready else ""),
        f"running {now.running:,} of {counted(now.slots, 'slot')}",
        f"scheduled {now.scheduled:,}",
        f"troubleshooting {now.in_troubleshooting:,}"
        + (f", oldest {_age(now.oldest_in_troubleshooting, now.at)}" if now.oldest_in_troubleshooting else ""),
    ]
    if now.unpublished:
        places.append(f"outbox {now.unpublished:,}, oldest {_age(now.oldest_unpublished, now.at)}")
    lines = [title, Text("  ".join(places))]
    if trouble is not None:
        lines.append(Text(f"Stands still. {shown(trouble)}", "bold red"))
    elif state is not HealthState.HEALTHY:
        first, *others = frame.health.reasons
        more = f" (+{len(others)} more: busload health)" if others else ""
        lines.append(Text(shown(first.message) + more, HEALTH[state]))
    return lines


def _last_line(view: View) -> Text:
    if view.question is not None:
        return Text(shown(view.question), "bold reverse")
    if view.sheet is not None:
        return Text("any key goes back", "dim")
    return Text(shown(view.said), "bold") if view.said else Text(KEYS, "dim")


def _table(frame: Frame, section: str, view: View | None, most: int | None, room: int | None = None) -> list[Text]:
    """The heading of a section, and rows around the chosen one."""
    columns, cells, styles, nothing = _cells(frame, section)
    if room is not None:
        columns, cells = _that_fit(section, columns, cells, room)
    at = None if view is None or section == "workers" else view.choose(frame, section)
    here = view is not None and view.section == section
    total = len(cells)
    most = max(1, total) if most is None else most
    first = 0 if at is None else max(0, min(at - most // 2, total - most))
    widths = _widths(columns, cells)
    heading = _row(columns, widths, columns)
    if total > most:
        heading += f"  {first + 1}–{min(first + most, total)} of {total}"
    lines = [Text(("▾ " if here else "  ") + heading, "bold" if here or view is None else "dim bold")]
    if not cells:
        return [*lines, Text("  " + nothing, "dim")]
    for number in range(first, min(first + most, total)):
        chosen = number == at
        mark = ("▸ " if here else "· ") if chosen else "  "
        line = Text(mark + _row(cells[number], widths, columns), styles[number])
        if chosen and here:
            line.stylize("reverse")
        lines.append(line)
    return lines


def _that_fit(
    section: str, columns: Sequence[str], cells: list[list[str]], room: int
) -> tuple[Sequence[str], list[list[str]]]:
    """The columns without those that there is no room for."""
    for spare in SPARE[section]:
        *widths, last = _widths(columns, cells)
        if 2 + sum(width + 2 for width in widths) + min(last, LAST) <= room:
            break
        at = columns.index(spare)
        columns = [*columns[:at], *columns[at + 1 :]]
        cells = [[*row[:at], *row[at + 1 :]] for row in cells]
    return columns, cells


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(cell_len(text) for text in column) for column in zip(columns, *cells, strict=True)]


def _row(texts: Sequence[str], widths: Sequence[int], columns: Sequence[str]) -> str:
    """Columns under each other; numbers stand on the right."""
    padded = [
        " " * (width - cell_len(text)) + text if name in NUMBERS else set_cell_size(text, width)
        for text, width, name in zip(texts, widths, columns, strict=True)
    ]
    return "  ".join(padded).rstrip()


NUMBERS = {"READY", "SCHEDULED", "RUNNING", "TROUBLE", "OUTBOX", "WORKERS", "TOTAL", "COUNT", "SLOTS", "RATE", "%"}


def _cells(frame: Frame, section: str) -> tuple[Sequence[str], list[list[str]], list[str], str]:
    """The columns of a section, its rows, how each looks, and what is said if there are none."""
    now = frame.at
    match section:
        case "domains":
            return (
                ("DOMAIN", "READY", "SCHEDULED", "RUNNING", "TROUBLE", "OUTBOX", "WORKERS", "STATE"),
                [_domain(each) for each in frame.overview.domains],
                ["yellow" if each.pause else "" for each in frame.overview.domains],
                "Nothing waits in any domain.",
            )
        case "batches":
            return (
                ("BATCH", "DOMAIN", "PROGRESS", "%", "TOTAL", "TROUBLE", "RATE", "DONE"),
                [_batch(each) for each in frame.batches],
                ["yellow" if each.held_at else "" for each in frame.batches],
                "No batch is under way.",
            )
        case "causes":
            return (
                ("COUNT", "CAUSE", "DOMAIN", "NEWEST", "ERROR"),
                [_cause(each, now) for each in frame.causes],
                [""] * len(frame.causes),
                "Nothing waits for a person.",
            )
        case _:
            return (
                ("WORKER", "STATE", "RUNNING", "SLOTS", "SEEN", "DOMAINS"),
                [_worker(each, now) for each in frame.workers],
                ["red" if each.state != "ALIVE" else "" for each in frame.workers],
                "No worker runs. Start one: busload worker app:bus",
            )


def _domain(each: DomainOverview) -> list[str]:
    state = "running"
    if each.pause is not None:
        why = joined(each.pause.operator, each.pause.reason)
        state = f"PAUSED by {why}" if why else "PAUSED"
    elif not each.workers:
        state = "no worker"
    counts = (each.ready, each.scheduled, each.running, each.in_troubleshooting, each.unpublished, each.workers)
    return [shown(each.domain), *map(shown, counts), shown(state)]


def _batch(batch: BatchMetadata) -> list[str]:
    part = batch.finished_count / batch.total_count if batch.total_count else 0.0
    full = int(part * BAR)
    forecast = batch.forecast
    rate = "–" if forecast is None else f"{forecast.rate:,.0f}/s"
    done = "–" if forecast is None else str(forecast)
    if forecast is not None and forecast.unknown is not None:
        done = f"unknown: {forecast.unknown.lower().replace('_', ' ')}"
    if batch.held_at is not None:
        done = "HELD by " + shown(batch.held_by or batch.held_reason)
    return [
        _short(shown(batch.name or str(batch.batch_id)), 32),
        _short(shown(batch.domain), 20),
        "█" * full + "░" * (BAR - full),
        f"{int(100 * part)}",
        shown(batch.total_count),
        shown(batch.in_troubleshooting_count),
        rate,
        done,
    ]


def _cause(cause: Cause, now: datetime) -> list[str]:
    group = cause.group
    error = joined(group.error_code or group.error_type, group.message) or ", ".join(group.reasons)
    age = f"{_age(group.newest, now)} ago"
    return [shown(group.count), group.fingerprint, _short(shown(cause.domain), 20), age, shown(error)]


def _worker(worker: KnownWorker, now: datetime) -> list[str]:
    seen, domains = f"{_age(worker.seen_at, now)} ago", ", ".join(worker.domains)
    name = _short(shown(worker.name), 40)
    return [name, worker.state, shown(worker.commands), shown(worker.concurrency), seen, shown(domains)]


def _age(since: datetime | None, now: datetime) -> str:
    return "–" if since is None else span(now - since)


def _short(text: str, most: int) -> str:
    return text if cell_len(text) <= most else f"{text[: most - 1]}…"
