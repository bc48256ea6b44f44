"""`busload worker --metrics`: the smallest web server that Prometheus can scrape and Kubernetes can probe."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import click
import msgspec

from busload.health.health import Health, HealthState
from busload.metrics.exposition import CONTENT_TYPE
from busload.worker import Worker

log = logging.getLogger("busload")

PATH = "/metrics"
LONGEST_REQUEST = 8 * 1024
"""Bytes that a request may have, head and all."""
MOST_CONNECTIONS = 16
PATIENCE = 5.0
"""Seconds for a request to come and its answer to go."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. Port 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def after(self, number: int) -> Address:
        """The address of the process with this number: the ports after the first, or any free one each."""
        return replace(self, port=self.port + number) if self.port else self

    def listen(self) -> socket.socket:
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family)
        except (OSError, OverflowError) as error:
            message = f"cannot listen on {self}: {getattr(error, 'strerror', None) or error}"
            raise click.BadParameter(message, param_hint="--metrics") from None


def address(ctx: click.Context, param: click.Parameter, text: str | None) -> Address | None:
    """`127.0.0.1:9464`, `[::1]:9464`, or a port alone, and then only this machine is served."""
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if port == text or host == "localhost":
        host = "127.0.0.1"
    elif host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise click.BadParameter(f"found {text!r}, wanted an IPv6 address in brackets, e.g. [::1]:9464")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise click.BadParameter(f"found {text!r}, wanted an IP address and a port, e.g. 127.0.0.1:9464") from None
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise click.BadParameter(f"found {text!r}, wanted a port from 0 to 65535, e.g. 127.0.0.1:9464")
    return Address(host, int(port))


@dataclass(frozen=True, slots=True)
class Page:
    """What a path answers with."""

    text: str
    kind: str
    ok: bool = True


def pages(worker: Worker) -> dict[str, Callable[[], Page]]:
    """What is served of a worker, by path.

    The pages are made in the event loop of the worker: while the loop is blocked, there is no answer at all.
    """

    def healthz() -> Page:
        health = worker.health()
        return _probe(health, ok=not health.restart_helps)

    def readyz() -> Page:
        health = worker.health()
        return _probe(health, ok=health.state is not HealthState.CRITICAL)

    return {PATH: lambda: Page(worker.metrics(), CONTENT_TYPE), "/healthz": healthz, "/readyz": readyz}


def _probe(health: Health, *, ok: bool) -> Page:
    return Page(msgspec.json.encode(health, enc_hook=str).decode() + "\n", "application/json", ok)


@asynccontextmanager
async def serve_pages(served: Mapping[str, Callable[[], Page]], listening: socket.socket) -> AsyncIterator[None]:
    """Answer `GET` of these paths as long as the block lasts, a request per connection."""
    connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections[task] = writer
        try:
            # The other side may be slow, gone or no web client at all: none of it is our trouble.
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(PATIENCE):
                    writer.write(await _answer(reader, served, crowded=len(connections) > MOST_CONNECTIONS))
                    await writer.drain()
        finally:
            del connections[task]
            writer.close()

    server = await asyncio.start_server(serve, sock=listening, limit=LONGEST_REQUEST)
    host, port, *_ = listening.getsockname()
    log.info("Metrics are at http://%s%s", Address(host, port), PATH)
    try:
        yield
    finally:
        server.close()
        for writer in connections.values():
            writer.transport.abort()
        await asyncio.gather(*connections)


async def _answer(reader: asyncio.StreamReader, served: Mapping[str, Callable[[], Page]], *, crowded: bool) -> bytes:
    if crowded:
        return _response("503 Service Unavailable", "Too many connections.\n")
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return _response("431 Request Header Fields Too Large", "The request is too long.\n")
    match head.split(b"\r\n", 1)[0].split(b" "):
        case [b"GET", target, b"HTTP/1.0" | b"HTTP/1.1"]:
            page = served.get(target.split(b"?", 1)[0].decode(errors="replace"))
            if page is None:
                return _response("404 Not Found", f"There is only {', '.join(served)}.\n")
            made = page()
            return _response("200 OK" if made.ok else "503 Service Unavailable", made.text, made.kind)
        case [_, _, b"HTTP/1.0" | b"HTTP/1.1"]:
            return _response("405 Method Not Allowed", "Only GET is answered.\n", allow="GET")
        case _:
            return _response("400 Bad Request", "This is not HTTP/1.1.\n")


def _response(status: str, text: str, kind: str = "text/plain; charset=utf-8", *, allow: str | None = None) -> bytes:
    body = text.encode(errors="replace")
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"Allow: {allow}"] if allow else []
    return "\r\n".join([*lines, "", ""]).encode() + body
