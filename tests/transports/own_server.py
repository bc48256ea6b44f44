"""What is promised of brokers of which a test can have one for itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from busload.errors import RefusalReason, TransportMisconfiguredError, TransportUnavailableError
from busload.testing import TransportContract
from busload.testing.messages import connected, messages, receiving, refusals
from tests.brokers.certificates import make_certificate
from tests.brokers.server import OwnServer


class OwnServerContract(TransportContract):
    @pytest.fixture
    def restartable(self, tmp_path: Path) -> Iterator[OwnServer]:
        raise NotImplementedError

    @pytest.fixture
    def certificate(self, tmp_path: Path) -> tuple[Path, Path]:
        """With its key."""
        return make_certificate(tmp_path)

    @pytest.fixture
    def secure_url(self, tmp_path: Path, certificate: tuple[Path, Path]) -> Iterator[str]:
        """Where a server shows this certificate; without options."""
        raise NotImplementedError

    async def test_tls_is_spoken_and_checked(
        self, secure_url: str, certificate: tuple[Path, Path], tmp_path: Path, queue: str
    ) -> None:
        ours, key = certificate
        async with connected(f"{secure_url}?ca={ours}&cert={ours}&key={key}") as transport:
            await transport.declare([queue])
            await transport.publish(messages(queue, [b"one"]))
            assert await transport.peek(queue, limit=1) == [b"one"]
        async with connected(secure_url) as stranger:
            with pytest.raises(TransportMisconfiguredError, match="TLS"):
                await stranger.declare([queue])
        async with connected(f"{secure_url}?ca={tmp_path / 'missing.pem'}") as careless:
            with pytest.raises(TransportMisconfiguredError, match=r"missing\.pem"):
                await careless.declare([queue])

    async def test_a_server_that_is_killed_is_noticed_and_found_again(self, restartable: OwnServer, queue: str) -> None:
        """Those who wait and those who publish are told at once, and the next call after its return works."""
        async with connected(restartable.url) as transport:
            await transport.declare([queue])
            async with receiving(transport, queue) as receiver:
                assert await receiver.nothing_for(0.1)
                restartable.kill()
                with pytest.raises(TransportUnavailableError):
                    await receiver.take(1)
            refused = await refusals(transport, messages(queue, [b"one", b"two"]))
            assert refused == dict.fromkeys([0, 1], RefusalReason.UNREACHABLE)
            restartable.start()
            await transport.publish(messages(queue, [b"three"]))
            assert await transport.depth(queue) == 1

    async def test_one_who_holds_all_it_may_notices_the_death_as_well(self, restartable: OwnServer, queue: str) -> None:
        async with connected(restartable.url) as transport:
            await transport.declare([queue])
            await transport.publish(messages(queue, [b"one"]))
            async with receiving(transport, queue, prefetch=1) as receiver:
                await receiver.take(1)
                restartable.kill()
                with pytest.raises(TransportUnavailableError):
                    await receiver.take(1)
