"""What waits for a person in all domains: one list, its total, the domains, and where a command is."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from busload import Command, CommandBus, HandlerContext, InvalidCommandError, PermanentCommandError, Worker
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Given

pytestmark = pytest.mark.usefixtures("invariants")

DOMAINS = (DOMAIN, "crm", "zoo")


async def failed(given: Given, domain: str, command_type: str = "Refuse", command_id: UUID | None = None) -> UUID:
    """A command of this domain that waits for a person now."""

    async def refuse(command: Command, ctx: HandlerContext) -> None:
        raise PermanentCommandError("account closed", code="CLOSED")

    if given.bus.handlers.find(domain, command_type) is None:
        given.bus.handler(domain, command_type)(refuse)
    sent = await given.bus.send(domain, command_type, {"at": domain}, command_id=command_id)
    await Worker(given.bus, domains=[domain], settings=given.settings).drain()
    return sent.command_id


@pytest.mark.parametrize("face", FACES)
async def test_all_domains_are_one_list_newest_first_with_its_total(dsn: str, given: Given, face: str) -> None:
    sent = [await failed(given, domain) for _ in range(2) for domain in DOMAINS]
    async with bus_of(face, dsn) as bus:
        found = await bus.troubleshooting.list(None)
        assert [item.command_id for item in found] == sent[::-1]
        assert [item.domain for item in found] == [*DOMAINS[::-1], *DOMAINS[::-1]]
        assert found[0] == (await bus.troubleshooting.list("zoo"))[0]
        assert await bus.troubleshooting.count() == 6
        assert await bus.troubleshooting.count("crm") == 2
        pages = [await bus.troubleshooting.list(None, limit=4, offset=offset) for offset in (0, 4, 8)]
        assert [item.command_id for page in pages for item in page] == sent[::-1]


async def test_the_list_of_all_domains_can_be_of_one_type(bus: CommandBus, given: Given) -> None:
    other = [await failed(given, domain, "Other") for domain in DOMAINS[:2]]
    for domain in DOMAINS:
        await failed(given, domain)
    found = await bus.troubleshooting.list(None, command_type="Other")
    assert [item.command_id for item in found] == other[::-1]
    assert await bus.troubleshooting.count(command_type="Other") == 2
    assert [each.domain for each in await bus.troubleshooting.domains(command_type="Other")] == ["crm", DOMAIN]


async def test_domains_with_failures_are_listed_with_their_counts(bus: CommandBus, given: Given) -> None:
    assert (await bus.troubleshooting.domains(), await bus.troubleshooting.count()) == ([], 0)
    await bus.send("idle", "Debit")
    for domain in ("zoo", "crm", "crm"):
        await failed(given, domain)
    crm, zoo = await bus.troubleshooting.domains()
    assert [(each.domain, each.count) for each in (crm, zoo)] == [("crm", 2), ("zoo", 1)]
    newest, oldest = await bus.troubleshooting.list("crm")
    assert (crm.oldest, crm.newest) == (oldest.since, newest.since)


async def test_a_command_is_found_without_its_domain(bus: CommandBus, given: Given) -> None:
    twice = uuid4()
    command_id = await failed(given, "crm")
    for domain in ("zoo", DOMAIN):
        await failed(given, domain, command_id=twice)
    [found] = await bus.troubleshooting.find(command_id)
    assert (found.domain, found) == ("crm", await bus.troubleshooting.get("crm", command_id))
    assert [item.domain for item in await bus.troubleshooting.find(twice)] == [DOMAIN, "zoo"]
    assert await bus.troubleshooting.find(uuid4()) == []
    await bus.troubleshooting.cancel("crm", command_id, reason="no")
    assert await bus.troubleshooting.find(command_id) == []


async def test_a_wrong_domain_or_id_is_refused(bus: CommandBus) -> None:
    with pytest.raises(InvalidCommandError, match="/domain"):
        await bus.troubleshooting.list("")
    with pytest.raises(InvalidCommandError, match="/domain"):
        await bus.troubleshooting.count("no domain")
    with pytest.raises(InvalidCommandError, match="/command_id"):
        await bus.troubleshooting.find("17")  # type: ignore[arg-type]
