"""Who may do what, by every route of the table: roles, forged requests, hosts, headers."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from busload import BatchCommand, CommandBus, Stage
from busload.dashboard import Principal, Role, app
from busload.dashboard.access import Permission, Users
from busload.dashboard.app import ROUTES
from busload.dashboard.guard import CSP, MOST_BODY
from busload.dashboard.route import action, page
from tests.dashboard.site import (
    BASE,
    MADE,
    NOWHERE,
    SAME_ORIGIN,
    USERS,
    address,
    client,
    every_address,
    first_answer,
    known_users,
    signed_in,
)
from tests.given import DOMAIN, Database, Given

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def guarded(bus: CommandBus) -> Starlette:
    """A dashboard with users."""
    return app(bus, authenticate=known_users())


# -- roles -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [None, *Role])
async def test_a_route_serves_exactly_the_roles_that_may(guarded: Starlette, role: Role | None) -> None:
    headers = {**SAME_ORIGIN, **FORM, **(signed_in(role) if role else {})}
    for method, path, route in every_address():
        status = (await first_answer(guarded, method, path, headers)).status
        if role is None:
            assert status == 401, route.name
        elif role is Role.OPERATOR or method == "GET":
            assert status in (200, 400, 404), route.name
        else:
            assert status == 403, route.name


async def _nothing(request: Request) -> Response:
    return Response()


def test_a_route_without_a_permission_fails_at_start() -> None:
    nobody: Any = None
    with pytest.raises(ValueError, match="Route 'new' has no permission"):
        page("new", "/new", _nothing, nobody)


def test_a_page_needs_read_and_an_action_operate() -> None:
    with pytest.raises(ValueError, match="Route 'new' is GET"):
        page("new", "/new", _nothing, Permission.OPERATE)
    with pytest.raises(ValueError, match="Route 'new' is POST"):
        action("new", "/new", _nothing, Permission.READ)


def test_two_routes_of_one_name_are_refused(bus: CommandBus) -> None:
    with pytest.raises(ValueError, match="same name"):
        app(bus, routes=[*ROUTES, ROUTES[0]])


# -- who is there ------------------------------------------------------------------------------------------------------


def _basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


SECRET = MADE[Role.OPERATOR][1]
WRONG = {
    "missing": None,
    "wrong secret": _basic("operator:wrong"),
    "truncated": _basic(f"operator:{SECRET[:-1]}"),
    "doubled": _basic(f"operator:{SECRET}{SECRET}"),
    "of another": _basic(f"reader:{SECRET}"),
    "unknown name": _basic(f"nobody:{SECRET}"),
    "no name": _basic(f":{SECRET}"),
    "no secret": _basic("operator:"),
    "the hash": _basic(f"operator:{USERS[1]}"),
    "not base64": "Basic !!!",
    "not UTF-8": "Basic //79",
    "another scheme": f"Digest {SECRET}",
    "bearer without a name": f"Bearer {SECRET}",
    "bearer of another": f"Bearer reader~{SECRET}",
    "empty": "",
}


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
async def test_a_wrong_credential_is_asked_for_a_right_one(guarded: Starlette, given: str | None) -> None:
    async with client(guarded) as http:
        answer = await http.get("/", headers={} if given is None else {"Authorization": given})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Basic realm="busload", charset="UTF-8"'


@pytest.mark.parametrize("given", [_basic(f"operator:{SECRET}"), f"Bearer operator~{SECRET}"], ids=["basic", "bearer"])
async def test_a_right_credential_is_let_in(guarded: Starlette, given: str) -> None:
    async with client(guarded, Authorization=given) as http:
        for _ in range(2):  # the second one is remembered
            answer = await http.get("/")
            assert answer.status_code == 200
            assert "operator" in answer.text


async def test_two_credentials_are_none(guarded: Starlette) -> None:
    async with client(guarded) as http:
        right = ("Authorization", _basic(f"operator:{SECRET}"))
        assert (await http.get("/", headers=[right, right])).status_code == 401


async def test_a_right_credential_is_hashed_once(guarded: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    from busload.dashboard import access

    hashed: list[str] = []
    scrypt = access._scrypt

    def counted(secret: str, salt: bytes) -> bytes:
        hashed.append(secret)
        return scrypt(secret, salt)

    monkeypatch.setattr(access, "_scrypt", counted)
    async with client(guarded, **signed_in(Role.READER)) as http:
        for _ in range(5):
            await http.get("/batches")
    assert len(hashed) == 1


def test_users_are_read_from_lines_and_commas() -> None:
    for between in (",", "\n", " ,\n "):
        users = Users.read(between.join(map(str, USERS)))
        assert users is not None
    assert Users.read(" \n,") is None


@pytest.mark.parametrize(
    "entry",
    [
        "ada",
        "ada:operator",
        "ada:king:scrypt$YQ==$YQ==",
        "a b:reader:scrypt$YQ==$YQ==",
        "ada:reader:md5$YQ==$YQ==",
        "ada:reader:scrypt$!$YQ==",
    ],
)
def test_a_wrong_entry_is_refused_without_its_hash(entry: str) -> None:
    with pytest.raises(ValueError, match="wanted name:role:hash") as refused:
        Users.read(entry)
    assert "YQ==" not in str(refused.value)


def test_a_name_has_one_entry() -> None:
    with pytest.raises(ValueError, match="several entries for 'reader'"):
        Users.read(f"{USERS[0]},{USERS[0]}")


async def test_users_of_the_environment_sign_in(bus: CommandBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSLOAD_DASHBOARD_USERS", ",".join(map(str, USERS)))
    async with client(app(bus)) as http:
        assert (await http.get("/")).status_code == 401
        assert (await http.get("/", headers=signed_in(Role.READER))).status_code == 200


@pytest.mark.parametrize("waits", [True, False])
async def test_the_host_application_says_who_is_there(bus: CommandBus, waits: bool) -> None:
    def found(request: Request) -> Principal | None:
        name = request.headers.get("x-user")
        return Principal(name, Role.READER) if name else None

    async def awaited(request: Request) -> Principal | None:
        return found(request)

    async with client(app(bus, authenticate=awaited if waits else found)) as http:
        refused = await http.get("/")
        assert refused.status_code == 401
        assert "www-authenticate" not in refused.headers
        answer = await http.get("/", headers={"X-User": "grace"})
        assert answer.status_code == 200
        assert "grace" in answer.text


async def test_an_authentication_that_fails_lets_nobody_in_and_shows_nothing(
    bus: CommandBus, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "1234"

    def broken(request: Request) -> Principal | None:
        raise RuntimeError(f"the secret of ada is {secret}")

    async with client(app(bus, authenticate=broken)) as http:
        answer = await http.get("/")
    assert answer.status_code == 500
    assert "The dashboard failed" in answer.text
    assert answer.headers["content-security-policy"] == CSP
    assert secret not in answer.text + caplog.text


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1"])
async def test_without_users_this_machine_is_served(dashboard: Starlette, peer: str) -> None:
    assert (await first_answer(dashboard, "GET", "/", {}, (peer, 9))).status == 200


@pytest.mark.parametrize("peer", ["10.0.0.1", "2001:db8::1", "testclient", None])
async def test_without_users_nobody_else_is_served(dashboard: Starlette, peer: str | None) -> None:
    given = None if peer is None else (peer, 9)
    for method, path, _ in every_address():
        assert (await first_answer(dashboard, method, path, SAME_ORIGIN, given)).status == 403


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
async def test_without_users_a_proxy_on_this_machine_lets_nobody_in(dashboard: Starlette, header: str) -> None:
    assert (await first_answer(dashboard, "GET", "/", {header: "10.0.0.1"})).status == 403


# -- forged requests ---------------------------------------------------------------------------------------------------

FORGED = {
    "no header": {"Origin": BASE},
    "another value": {"X-Busload": "2", "Origin": BASE},
    "no origin": {"X-Busload": "1"},
    "null origin": {"X-Busload": "1", "Origin": "null"},
    "another origin": {"X-Busload": "1", "Origin": "http://evil.example"},
    "another port": {"X-Busload": "1", "Origin": "http://localhost:99"},
    "a malformed origin": {"X-Busload": "1", "Origin": "http://["},
    "a similar origin": {"X-Busload": "1", "Origin": "http://localhost.evil.example"},
    "cross-site": {"X-Busload": "1", "Origin": BASE, "Sec-Fetch-Site": "cross-site"},
    "same-site": {"X-Busload": "1", "Origin": BASE, "Sec-Fetch-Site": "same-site"},
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
async def test_a_change_from_another_site_is_refused(
    dashboard: Starlette, given: Given, forged: dict[str, str]
) -> None:
    batch_id = await given.batch()
    async with client(dashboard, **forged) as http:
        for route in ROUTES:
            if route.method == "POST":
                path = address(route, batch_id=batch_id)
                assert (await http.post(path, data={"reason": "forged", "priority": "9"})).status_code == 403
    batch = await given.batch_now(batch_id)
    assert batch.held_at is None and batch.canceled_count == 0


async def test_a_form_of_another_kind_is_refused(site: httpx.AsyncClient, given: Given) -> None:
    batch_id = await given.batch()
    for kind in ("text/plain", "application/json", "multipart/form-data; boundary=x"):
        answer = await site.post(f"/batches/{batch_id}/hold", content='{"reason": "x"}', headers={"Content-Type": kind})
        assert answer.status_code == 415
    assert (await given.batch_now(batch_id)).held_at is None


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_no_other_method_is_answered(site: httpx.AsyncClient, method: str) -> None:
    for _, path, route in every_address():
        assert (await site.request(method, path)).status_code == 405, route.name


async def test_reading_every_page_changes_nothing(
    dashboard: Starlette, site: httpx.AsyncClient, given: Given, database: Database, bus: CommandBus
) -> None:
    batch_id, [command_id] = await given.in_troubleshooting()
    job_id = await bus.jobs.create(DOMAIN, [Stage("a", [BatchCommand("Debit")])])
    await bus.buffer("nobody").add(1)  # the name that addresses of tests have
    bus.schedule("nobody", every=timedelta(hours=1), command=BatchCommand("Debit"), domain=DOMAIN)
    await bus.schedules.sync()
    before = database.everything()
    for method, path, route in every_address():
        if method == "GET":
            named = batch_id if "batch_id" in route.path else job_id if "job_id" in route.path else command_id
            path = path.replace(str(NOWHERE), str(named))
            assert (await first_answer(dashboard, method, path, {})).status in (200, 400), path
        else:
            assert (await site.get(path)).status_code == 405
    assert database.everything() == before


# -- hosts, sizes and headers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8484", "[::1]:8484", "LOCALHOST:1", "ops.example.com"])
async def test_a_host_of_the_list_is_served(bus: CommandBus, host: str) -> None:
    served = app(bus, hosts=("localhost", "127.0.0.1", "[::1]", "ops.example.com"))
    assert (await first_answer(served, "GET", "/", {"host": host})).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "", "127.0.0.1.evil.example:80", "[::1", "::1"]
)
async def test_any_other_host_is_refused(dashboard: Starlette, host: str) -> None:
    for method, path, _ in every_address():
        assert (await first_answer(dashboard, method, path, {**SAME_ORIGIN, "host": host})).status == 421


async def test_a_body_over_the_limit_is_refused(site: httpx.AsyncClient, given: Given) -> None:
    batch_id = await given.batch()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(MOST_BODY // 1024 + 1):
            yield b"x" * 1024

    for content in (b"reason=" + b"x" * MOST_BODY, chunks()):
        answer = await site.post(f"/batches/{batch_id}/hold", content=content, headers=FORM)
        assert answer.status_code == 413
        assert "64 KiB" in answer.text
    assert (await given.batch_now(batch_id)).held_at is None


@pytest.mark.parametrize(
    "headers",
    [{}, {"host": "evil.example"}, {**SAME_ORIGIN, **signed_in(Role.OPERATOR)}, signed_in(Role.READER)],
    ids=["nobody", "another host", "operator", "reader"],
)
async def test_every_answer_carries_the_headers(guarded: Starlette, headers: dict[str, str]) -> None:
    for method, path, route in every_address():
        answer = await first_answer(guarded, method, path, headers)
        assert answer.headers["content-security-policy"] == CSP
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert not [name for name in answer.headers if name.startswith("access-control")]
        kept = route.name == "static" and answer.status == 200
        assert answer.headers["cache-control"] == ("public, max-age=31536000, immutable" if kept else "no-store")


async def test_the_policy_is_the_promised_one() -> None:
    assert CSP == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    )


async def test_pages_that_are_not_there_carry_the_headers_too(site: httpx.AsyncClient) -> None:
    for path in ("/nowhere", "/static/0/app.css", "/static/x/../../app.py", "/batches/", f"/batches/{DOMAIN}"):
        answer = await site.get(path)
        assert answer.status_code == 404, path
        assert answer.headers["content-security-policy"] == CSP
