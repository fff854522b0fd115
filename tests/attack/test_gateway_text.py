"""A tenant's text never becomes the proxy's configuration: it is taken literally, or refused."""

from __future__ import annotations

import os
import string
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from harness.waiting import until
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shoal.gateway.binary import GatewayError, find_binary
from shoal.gateway.gateway import HaproxyBalancer
from shoal.gateway.process import Proxy
from shoal.gateway.quote import Refused
from shoal.gateway.render import Place, render
from shoal.model.service import (
    GatewayEntry,
    Replica,
    Route,
    Routing,
    Served,
    ServiceSpec,
    Wanted,
    problem_with_service,
)
from tests.gateway.world import World

SECRET = "SHOAL_TEST_PASSWORD"
TEXTS = ("host", "path", "sticky_header", "sticky_cookie", "rate_header", "certificate")
NASTY = (
    *(
        "$" + SECRET,
        "${HOME}",
        "a#b",
        "-f",
        "--",
        "}",
        "{",
        "it's",
        'a"b',
        "a b",
        "a\\",
        "\\n",
        "%[",
    ),
    *(
        "%[env(PATH)]",
        "a,b",
        "a)",
        "a)b(c",
        "%%",
        "a\nbind :1",
        "a\x00b",
        "if",
        "or",
        "!x",
        "é",
        "",
    ),
)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    try:
        yield Proxy(tmp_path_factory.mktemp("gw"), find_binary())
    except GatewayError as error:
        pytest.skip(str(error))


@pytest.fixture
def world() -> Iterator[World]:
    try:
        find_binary()
    except GatewayError as error:
        pytest.skip(str(error))
    made = World()
    yield made
    made.close()


def with_text(field: str, text: str) -> dict[str, object]:
    """A route that uses the text, if the field takes it."""
    route: dict[str, object] = {"service": "chat", field: text}
    if field.startswith("sticky"):
        route["routing"] = "sticky"
    if field == "rate_header":
        route["rate_per_s"] = 5
    if field == "certificate":
        route["port"] = 8443
    return route


def admitted(route: dict[str, object]) -> tuple[Route | None, str]:
    """As the API and the core do it: the route, or the line that refuses it."""
    raw = {"name": "chat", "replica": {"command": ["true"]}, "route": route}
    try:
        spec = msgspec.convert(raw, ServiceSpec)
    except msgspec.ValidationError as error:
        return None, str(error)
    problem = problem_with_service(spec)
    return (None, ": ".join(problem)) if problem else (spec.way, "")


def taken_apart(line: str) -> list[str]:
    """A line of the configuration as HAProxy reads it: its words, without quotes."""
    words: list[str] = []
    word, inside, quoted = "", False, False
    at = 0
    while at < len(line):
        letter = line[at]
        if quoted and letter != "'":
            word += letter
        elif letter == "'":
            quoted, inside = not quoted, True
        elif letter == "\\":
            at, inside = at + 1, True
            word += line[at]
        elif letter == " ":
            words, word, inside = words + [word] * inside, "", False
        else:
            assert letter not in '#"', f"{letter} begins a comment or is expanded: {line}"
            word, inside = word + letter, True
        at += 1
    return words + [word] * inside


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(TEXTS), st.text(alphabet=string.printable + "é\x00", max_size=40))
@example("sticky_cookie", "shoal-0123abcd")
def test_text_of_a_route_is_refused_by_its_field_or_taken_literally(
    proxy: Proxy, field: str, text: str
) -> None:
    check_text(proxy, field, text)


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize("text", NASTY)
def test_nasty_text_is_refused_by_its_field_or_taken_literally(
    proxy: Proxy, field: str, text: str
) -> None:
    check_text(proxy, field, text)


def check_text(proxy: Proxy, field: str, text: str) -> None:
    route, refused = admitted(with_text(field, text))
    if route is None:
        assert field in refused or (not text and "sticky" in refused), refused
        assert "\n" not in refused
    # The proxy's own wall, whatever was admitted before, by whom, and by which version.
    raw = msgspec.structs.replace(Route(service="chat"), **with_text(field, text))
    if raw.routing == "sticky":
        raw = msgspec.structs.replace(raw, routing=Routing.STICKY)
    raw = msgspec.structs.replace(raw, certificate="")
    try:
        rendered = render(Wanted(services=(Served(route=raw),)), Place(log=False))
    except Refused:
        assert route is None, "it was admitted, and cannot be served"
        return
    proxy.check(rendered)
    harmless = {"path": "/harmless"}.get(field, "harmless")
    used = raw.prefix != "/chat" if field == "path" else bool(getattr(raw, field))
    other = msgspec.structs.replace(raw, **{field: harmless if used else ""})
    usual = render(Wanted(services=(Served(route=other),)), Place(log=False))
    pairs = zip(words_of(rendered), words_of(usual), strict=True)
    assert all(one == two or "harmless" in two for one, two in pairs)


def words_of(rendered: str) -> list[str]:
    """Without what follows from the text: the configuration's name and the length of a path."""
    lines = [line for line in rendered.splitlines()[1:] if "description " not in line]
    found = [["\n", *taken_apart(line)] for line in lines if "set-path %[path" not in line]
    return [word for line in found for word in line]


def test_a_cookie_named_like_a_variable_gives_nothing_of_the_heads_environment(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "hunter2")
    (one,) = world.start("one")
    route = Route(service="chat", routing=Routing.STICKY, sticky_cookie="$" + SECRET)
    world.serve(route, one)
    until(lambda: world.get("/chat/").status == 200, "the replica")
    answer = world.get("/chat/")
    assert answer.headers["set-cookie"].startswith(f"${SECRET}=")
    assert "hunter2" not in str(answer.headers)
    pid = world.gateway.pid()
    assert pid is not None
    for number in (pid, *children(pid)):
        text = Path(f"/proc/{number}/environ").read_bytes()
        assert b"hunter2" not in text and b"PATH=" not in text


def children(pid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{name}/stat").read_text()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == pid:
            found.append(int(name))
    return found


@pytest.mark.parametrize(
    "value",
    [
        "shoal-0123abcd=mine; Path=/",
        " =shoal-0123abcd=mine",
        "=\tshoal-0123abcd=mine",
        "shoal-0123abcd-oidc=mine",
        "shoal-0123abcd",
    ],
)
def test_a_service_cannot_set_the_session_of_the_page(world: World, value: str) -> None:
    (one,) = world.start("one")
    world.serve(Route(service="chat"), one)
    path = f"/chat/cookies?set={quote(value)}"
    until(lambda: world.get(path).status == 200, "the replica")
    answer = world.get(path)
    assert "shoal-" not in answer.headers["set-cookie"]
    assert "own=kept" in answer.headers["set-cookie"]


def test_only_the_service_that_the_proxy_refuses_stays_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if one text were not quoted well: HAProxy itself says no."""
    replicas = world.start("one", "two")
    balancer = HaproxyBalancer(world.directory)
    asked = []
    check = Proxy.check

    def counted(proxy: Proxy, text: str) -> Path:
        asked.append(text)
        return check(proxy, text.replace("path -- /bad ", "path -f /bad "))

    monkeypatch.setattr(Proxy, "check", counted)

    def look(*names: str) -> dict[str, str]:
        services = tuple(Served(route=Route(service=one), replicas=replicas) for one in names)
        loads = balancer.look(Wanted(entry=GatewayEntry(port=world.port), services=services))
        return {name: load.trouble for name, load in loads.items()}

    names = ("a", "b", "bad", "c", "d")
    troubles = look(*names)
    assert troubles["bad"].startswith("service bad: HAProxy refuses the configuration: ")
    assert [troubles[name] for name in names if name != "bad"] == [""] * 4
    until(lambda: world.get("/d/").status == 200, "the last of the good ones")
    assert world.get("/bad/").status == 404
    count = len(asked)
    assert look(*names)["bad"] == troubles["bad"]
    assert len(asked) == count, "HAProxy is asked again about what it refused"
    assert look("a", "b", "c", "d") == dict.fromkeys("abcd", "")


def test_text_that_no_line_can_hold_harms_its_service_alone(world: World) -> None:
    (one,) = world.start("one")
    balancer = HaproxyBalancer(world.directory)
    evil = msgspec.structs.replace(Route(service="evil"), host="x\n    bind :1")
    services = tuple(Served(route=route, replicas=(one,)) for route in (Route(service="a"), evil))
    loads = balancer.look(Wanted(entry=GatewayEntry(port=world.port), services=services))
    assert loads["a"].trouble == ""
    assert "service evil: " in loads["evil"].trouble
    until(lambda: world.get("/a/").status == 200, "the other service")


def test_a_replicas_name_cannot_be_a_command_on_the_socket(world: World) -> None:
    (one,) = world.start("one")
    evil = msgspec.structs.replace(one, id="x; shutdown sessions server chat/x")
    with pytest.raises(Refused):
        world.serve(Route(service="chat"), evil)
    assert isinstance(evil, Replica)


def test_a_strange_but_legal_header_name_limits_by_exactly_that_header(world: World) -> None:
    (one,) = world.start("one")
    name = "x#$HOME'*"
    assert admitted(with_text("rate_header", name))[0] is not None
    world.serve(Route(service="chat", rate_per_s=1, rate_header=name), one)
    until(lambda: world.get("/chat/", headers={name: "first"}).status == 200, "the replica")

    def statuses(*headers: dict[str, str]) -> set[int]:
        return {world.get("/chat/", headers=header).status for header in headers}

    assert statuses(*({name: f"sender {number}"} for number in range(20))) == {200}
    assert 429 in statuses(*[{name: "one sender"}] * 20)
    assert 429 in statuses(*[{"x": f"sender {number}"} for number in range(20)]), "by address"
