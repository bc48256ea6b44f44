"""Write `src/busload/sync/`: the same API without await, made from the async modules. Run it by `make sync`.

Of each source the definitions are taken that wait, or that use something that waits. All others, such as constants,
values and decisions, are imported from the source, so that both faces share them. In the text that is taken `async`
and `await` are left out, and names are replaced as `NAMES` says: in code, comments and docstrings alike.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "src/busload/sync"

SOURCES = {
    "busload.audit.actions": "audit",
    "busload.batches.api": "batches",
    "busload.batches.callbacks": "callbacks",
    "busload.batches.cancel": "cancel",
    "busload.handlers.handle": "handle",
    "busload.health.api": "health",
    "busload.doctor.api": "doctor",
    "busload.health.workers": "workers",
    "busload.jobs.api": "jobs",
    "busload.jobs.steps": "steps",
    "busload.batches.open_batch": "open_batch",
    "busload.buffers.buffer": "buffer",
    "busload.bus": "bus",
    "busload.commands.api": "commands",
    "busload.dispatch.create_batch": "create_batch",
    "busload.dispatch.api": "outbox",
    "busload.limits.api": "limits",
    "busload.metrics.api": "metrics",
    "busload.postgres.database": "database",
    "busload.postgres.guarded_connection": "guarded_connection",
    "busload.postgres.listen": "listen",
    "busload.postgres.own_connection": "connection",
    "busload.postgres.plan": "plan",
    "busload.postgres.pool": "pool",
    "busload.schedules.api": "schedules",
    "busload.schedules.planned": "planned",
    "busload.shards.bus": "shards",
    "busload.shards.parts": "shard_parts",
    "busload.statistics.api": "statistics",
    "busload.tasks.phased_tracker": "phased_tracker",
    "busload.tasks.tracker": "tracker",
    "busload.testing.joined": "joined",
    "busload.troubleshooting.api": "troubleshooting",
    "busload.worker.context": "context",
}
"""The modules that are made, each from which one."""

WAITS = ("busload.postgres", "waiting")
CALLERS = "busload.postgres.callers_connection"
TWINS = {
    WAITS: ("busload.postgres", "waiting_in_threads"),
    ("busload.commands.send_together", "Sending"): ("busload.commands.send_together", "SendingInThreads"),
    ("busload.dispatch.publish", "Publisher"): ("busload.dispatch.publish_in_threads", "ThreadPublisher"),
    ("busload.dispatch.reconcile", "Reconciler"): ("busload.dispatch.publish_in_threads", "ThreadReconciler"),
    ("busload.dispatch.relay", "recover"): ("busload.dispatch.publish_in_threads", "recover"),
    ("busload.doctor.broker", "ask_broker"): ("busload.doctor.broker", "ask_broker_in_threads"),
    (CALLERS, "perform_any"): (CALLERS, "perform_in_threads"),
    (CALLERS, "underneath"): (CALLERS, "underneath_in_threads"),
}
"""What is written by hand for threads, in another module."""

NAMES = {
    # written by hand in both forms
    "AnyConnection": "AnySyncConnection",
    "AsyncConnection": "Connection",
    "Publisher": "ThreadPublisher",
    "Sending": "SendingInThreads",
    "underneath": "underneath_in_threads",
    # made here
    "AsyncListener": "Listener",
    "AsyncPool": "Pool",
    "BatchCompletionCallback": "SyncBatchCompletionCallback",
    "Buffer": "SyncBuffer",
    "CallersTransaction": "SyncCallersTransaction",
    "ChunkContext": "SyncChunkContext",
    "CommandBus": "SyncCommandBus",
    "CommandHandle": "SyncCommandHandle",
    "FinishedStage": "SyncFinishedStage",
    "GuardedAsyncConnection": "GuardedConnection",
    "HandlerContext": "SyncHandlerContext",
    "HandlerTransaction": "SyncHandlerTransaction",
    "OldTracker": "SyncOldTracker",
    "OpenBatch": "SyncOpenBatch",
    "Outbox": "SyncOutbox",
    "OwnAsyncConnection": "OwnConnection",
    "PhasedTracker": "SyncPhasedTracker",
    "ShardedBus": "SyncShardedBus",
    "TaskTracker": "SyncTaskTracker",
    "Troubleshooting": "SyncTroubleshooting",
    "async_pool": "pool",
    "connect_async": "connect",
    "connect_within_async": "connect_within",
    "check_server_async": "check_server",
    "perform_any": "perform_in_threads",
    "perform_async": "perform",
    # of Python and psycopg
    "AsyncCursor": "Cursor",
    "AsyncIterator": "Iterator",
    "AsyncServerCursor": "ServerCursor",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "asynccontextmanager": "contextmanager",
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Source:
    """An async module: its imports, its definitions, and which of these wait."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.path = ROOT / "src" / f"{module.replace('.', '/')}.py"
        self.lines = self.path.read_text(encoding="utf-8").splitlines()
        self.tree = ast.parse("\n".join(self.lines))
        self.imports = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)]
        self.definitions = {name: node for node in self.tree.body for name in _defined(node)}
        self.waiting: set[str] = set()

    def find_waiting(self, sources: dict[str, Source]) -> bool:
        """Look for definitions that wait or use one that does; returns whether there are more than known before."""
        known = {name for name in NAMES if not name.startswith("__")} | {"Awaitable", "Coroutine"} | self.waiting
        for node in self.imports:
            source = sources.get(node.module or "")
            known |= {alias.asname or alias.name for alias in node.names if _is_waiting(node, alias, source)}
        found = {name for name, node in self.definitions.items() if _waits(node) or _names(node) & known}
        more, self.waiting = found - self.waiting, found
        return bool(more)

    def text(self, sources: dict[str, Source]) -> str:
        """The module that is made of it, not yet in order."""
        shared = sorted(self.definitions.keys() - self.waiting)
        nodes = {id(node): node for name, node in self.definitions.items() if name in self.waiting}
        parts = [
            f'"""Made from {self.module} by scripts/generate_sync.py. Change the source instead."""',
            "from __future__ import annotations",
            *(self._import(node, sources) for node in self.tree.body),
            *([f"from {self.module} import {', '.join(shared)}"] if shared else []),
            *(without_await(self._lines(node)) for node in nodes.values()),
        ]
        return "\n\n\n".join(part for part in parts if part) + "\n"

    def _import(self, node: ast.stmt, sources: dict[str, Source]) -> str:
        if isinstance(node, ast.Import):
            return ast.unparse(node)
        if isinstance(node, ast.If):  # TYPE_CHECKING
            lines = [self._import(each, sources) for each in node.body]
            return f"if {ast.unparse(node.test)}:\n" + "\n".join(f"    {line}" for line in "\n".join(lines).split("\n"))
        if not isinstance(node, ast.ImportFrom) or node.module == "__future__":
            return ""
        lines = []
        for alias in node.names:
            module, name = node.module or "", alias.name
            source = sources.get(module)
            if (module, name) in TWINS:
                module, name = TWINS[module, name]
            else:
                name = NAMES.get(name, name)
                if source is not None and alias.name in source.waiting:
                    module = f"busload.sync.{SOURCES[module]}"
            local = NAMES.get(alias.asname or alias.name, alias.asname or alias.name)
            lines.append(f"from {module} import {name}" + (f" as {local}" if local != name else ""))
        return "\n".join(lines)

    def _lines(self, node: Definition) -> str:
        """The text of a definition, with the comment above it and, of a constant, the docstring below."""
        first = min(each.lineno for each in (node, *getattr(node, "decorator_list", ()))) - 1
        while self.lines[first - 1].startswith("#"):
            first -= 1
        last = node.end_lineno or 0
        after = self.tree.body[self.tree.body.index(node) + 1 :][:1]
        if isinstance(node, ast.Assign | ast.AnnAssign) and after and isinstance(after[0], ast.Expr):
            last = after[0].end_lineno or 0
        return "\n".join(self.lines[first:last])


def _defined(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            return [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
    return []


def _is_waiting(node: ast.ImportFrom, alias: ast.alias, source: Source | None) -> bool:
    return (node.module, alias.name) in TWINS or (source is not None and alias.name in source.waiting)


def _waits(node: ast.AST) -> bool:
    waits = ast.AsyncFunctionDef | ast.AsyncWith | ast.AsyncFor | ast.Await
    return any(isinstance(each, waits) for each in ast.walk(node))


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def without_await(text: str) -> str:
    text = re.sub(r"\basync (def|with|for)\b", r"\1", text)
    text = re.sub(r"\bawait ", "", text)
    text = re.sub(r"\b(?:Coroutine\[Any, Any, (\w+)\]|Awaitable\[(\w+)\])", lambda found: found[1] or found[2], text)
    text = re.sub(rf"\b({'|'.join(NAMES)})\b", lambda found: NAMES[found[1]], text)
    return re.sub(r"\b(\w+) \| \1\b", r"\1", text)


def in_order(text: str, path: Path) -> str:
    """Without imports that nobody needs, sorted and formatted as ruff does it."""
    for command in (["check", "--fix-only", "--unsafe-fixes", "--select", "F401,F811,I,SIM117,UP"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(path), "-"]
        text = subprocess.run(ruff, input=text, text=True, check=True, capture_output=True, cwd=ROOT).stdout
    return text


def generate() -> dict[Path, str]:
    """Every module of the sync face, by its path."""
    sources = {module: Source(module) for module in SOURCES}
    while sum(source.find_waiting(sources) for source in sources.values()):
        continue
    paths = {module: FOLDER / f"{name}.py" for module, name in SOURCES.items()}
    return {paths[module]: in_order(source.text(sources), paths[module]) for module, source in sources.items()}


if __name__ == "__main__":
    for path, text in generate().items():
        path.write_text(text, encoding="utf-8")
