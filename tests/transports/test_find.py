"""A transport is found by the scheme of its URL, among ours and those that other packages offer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from busload.errors import TransportMisconfiguredError
from busload.transports import find_transport
from busload.transports.base import without_password

SECRET = "kept-to-ourselves"

PIGEON = """
from busload.transports import Transport


class Pigeon(Transport):
    name = "pigeon"
    max_bytes = 100

    async def declare(self, queues): ...
    async def publish(self, messages): ...
    def deliveries(self, queue, *, prefetch): ...
    async def aclose(self): ...
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Installs a package of a third party that offers a transport, for the test alone."""
    modules = []

    def install(module: str, source: str) -> None:
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[busload.transports]\n{module} = {module}:Pigeon\n")
        modules.append(module)

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for module in modules:
        sys.modules.pop(module, None)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        (f"amqp://user:{SECRET}@host:5672/", "RabbitmqTransport"),
        (f"amqps://user:{SECRET}@host/", "RabbitmqTransport"),
        (f"postgresql://user:{SECRET}@host/database", "PostgresqlTransport"),
        (f"postgres://user:{SECRET}@host/database", "PostgresqlTransport"),
    ],
)
def test_a_scheme_finds_its_transport(url: str, kind: str) -> None:
    """Nothing is connected, and no password is shown."""
    transport = find_transport(url)
    assert type(transport).__name__ == kind
    assert SECRET not in repr(transport)
    assert "user" not in repr(transport) and "@host" not in repr(transport) and "host" in repr(transport)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"ampq://user:{SECRET}@host/", r"found the scheme 'ampq', wanted one of amqp, .*Did you mean 'amqp'\?"),
        (f"carrier-pigeon://user:{SECRET}@host/", r"found the scheme 'carrier-pigeon', wanted one of amqp, .*"),
        (f"user {SECRET} host", "found no scheme, wanted one of amqp, .*"),
        ("", "The URL of the transport is empty"),
    ],
)
def test_a_url_that_no_transport_fits_is_refused(url: str, said: str) -> None:
    with pytest.raises(TransportMisconfiguredError, match=said) as refused:
        find_transport(url)
    assert SECRET not in str(refused.value)


def test_a_transport_of_a_third_party_is_found(installed: Callable[[str, str], None]) -> None:
    installed("pigeon", PIGEON)
    transport = find_transport(f"pigeon://keeper:{SECRET}@loft/?secret={SECRET}")
    assert (transport.name, repr(transport)) == ("pigeon", "<Pigeon pigeon://loft/>")


def test_a_library_that_is_missing_is_named_with_how_to_install_it(installed: Callable[[str, str], None]) -> None:
    installed("owl", "import feathers_of_owls\n")
    with pytest.raises(TransportMisconfiguredError, match=r"feathers_of_owls.*pip install 'busload\[owl\]'") as refused:
        find_transport(f"owl://keeper:{SECRET}@tower")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"amqp://user:{SECRET}@host:5672/vhost?cadata={SECRET}#{SECRET}", "amqp://host:5672/vhost"),
        (f"amqp://user:p@{SECRET}@host/", "amqp://host/"),
        (f"amqp://{SECRET}@host", "amqp://host"),
        (f"amqp://user:{SECRET}@[host/", "(unreadable URL)"),
        ("nats://a:1,b:2", "nats://a:1,b:2"),
        (f"amqp://user:{SECRET}/with/slashes@host/", "amqp://(hidden)"),
        (f"amqp://user:{SECRET}?and#more@host/", "amqp://(hidden)"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        *(f"{scheme}://user:p?{SECRET}@host/" for scheme in ("amqp", "nats", "redis", "pgmq", "postgresql")),
        *(f"{scheme}://user:p?a&{SECRET}=1@host/" for scheme in ("amqp", "nats", "redis", "pgmq", "postgresql")),
        *(f"{scheme}://user:p@{SECRET}@host/database" for scheme in ("pgmq", "postgresql", "postgres")),
        *(f"{scheme}://user:12/{SECRET}@host/database" for scheme in ("pgmq", "postgresql", "postgres")),
    ],
)
def test_a_password_that_was_not_encoded_is_refused_and_not_shown(url: str) -> None:
    """What follows its '?' or '@' would be taken for an option or a host"""
    with pytest.raises(TransportMisconfiguredError) as refused:
        find_transport(url)
    assert SECRET not in str(refused.value)
    assert "percent-encode" in str(refused.value) or "cannot be read" in str(refused.value)


def test_an_option_that_is_misspelt_is_still_named() -> None:
    with pytest.raises(TransportMisconfiguredError, match=r"found 'timeuot', .* Did you mean 'timeout'\?"):
        find_transport(f"amqp://user:{SECRET}@host/?timeuot=3")
