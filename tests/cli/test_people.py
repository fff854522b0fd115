"""Tenants, users and tokens on the command line, against a real cluster."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.verbs.tenant import added_text
from shoal.client import Client, ShoalError
from tests.cli.conftest import Shoal, assert_one_clear_line
from tests.live.cluster import Live


@pytest.fixture(autouse=True)
def nobody_stays(cluster: Live) -> Iterator[None]:
    yield
    for user in cluster.client.users():
        cluster.client.remove_user(user.name)
    for tenant in cluster.client.tenants():
        cluster.client.remove_tenant(tenant.name)


def test_who_adds_a_tenant_learns_where_it_is_not_kept_apart() -> None:
    apart = "added the tenant lab; its jobs run as the Unix user 7"
    problem = "tenants apart from each other (the agent is not root)"
    assert added_text("lab", 7, {"a": [], "b": ["memory (no writable cgroup)"]}) == (apart, "")
    text, warning = added_text("lab", 7, {"a": [], "b": ["memory (no cgroup)", problem]})
    assert text == f"{apart} where the agent is root"
    assert warning == f"not enforced on b: {problem}"


def test_from_a_tenant_to_a_token_each_step_names_the_next(
    live_shoal: Shoal, cluster: Live
) -> None:
    assert "tenants: the cluster is yours alone" in live_shoal("tenant").err
    added = live_shoal("tenant", "add", "lab")
    assert re.search(r"added the tenant lab; .* Unix user \d+\n", added.out)
    assert added.err.endswith("next: shoal user add NAME --tenant lab\n")
    added = live_shoal("user", "add", "ann", "--tenant", "lab")
    assert (added.out, added.err) == (
        "ann: member in lab\n",
        "next: shoal user invite ann, or shoal token add ann\n",
    )
    made = live_shoal("token", "add", "ann", "--expires", "30d")
    assert re.fullmatch(r"shoal_[0-9a-f]{8}_[\w-]{43}\n", made.out)
    assert "the only time that the token is shown: ann, member in lab, expires in 30d" in made.err
    assert "only this machine reaches the cluster; open it to others with: shoal down" in made.err
    with Client(cluster.client.url, made.out.strip()) as client:
        assert client.me().user == "ann"


def test_an_invite_becomes_a_token_once_and_a_removal_says_what_it_did(
    live_shoal: Shoal, cluster: Live
) -> None:
    live_shoal("tenant", "add", "lab")
    made = live_shoal("user", "invite", "ann", "--tenant", "lab", "--expires", "2d")
    assert re.fullmatch(r"http\S+/#invite=invite_[0-9a-f]{8}_[\w-]{43}\n", made.out)
    assert "good once, and is shown only now: ann, member in lab, within 2d" in made.err
    assert "invite, not accepted yet" in live_shoal("token").out
    code = made.out.partition("#invite=")[2].strip()
    with Client(cluster.client.url, "") as client:
        secret = client.accept_invite(code).secret
        with pytest.raises(ShoalError, match="was accepted, was removed or has expired"):
            client.accept_invite(code)
    with Client(cluster.client.url, secret) as client:
        assert client.me().user == "ann"
    assert_one_clear_line(live_shoal("user", "invite", "ann", "--expires", "8d"))
    gone = live_shoal("user", "remove", "ann", "--end")
    assert re.search(r"token +\w{8} +invite +lab +is revoked", gone.out)
    assert "removed the user ann and all tokens of ann" in gone.out


def test_the_tables_show_roles_and_ends(live_shoal: Shoal) -> None:
    live_shoal("tenant", "add", "lab", "--uid", "1500")
    live_shoal("user", "add", "ann", "--tenant", "lab", "--role", "viewer")
    live_shoal("user", "add", "carl", "--role", "admin")
    live_shoal("token", "add", "ann", "--expires", "never", "--note", "the wall screen")
    live_shoal("token", "add", "carl")
    assert live_shoal("tenant", "list").out.splitlines()[1].split()[:4] == ["lab", "1500", "1", "0"]
    ann, carl = live_shoal("user", "list").out.splitlines()[1:]
    assert re.match(r"ann +viewer in lab +1 ", ann)
    assert re.match(r"carl +admin in every tenant +1 ", carl)
    ann, carl = live_shoal("token").out.splitlines()[1:]
    assert re.match(r"\w{8} +ann +lab +viewer +[\d-]+ +never +the wall screen", ann)
    assert re.match(r"\w{8} +carl +every tenant +admin +[\d-]+ +in 90d", carl)
    live_shoal("user", "set", "ann", "--tenant", "lab", "--role", "none")
    assert "void: ann has no role in lab" in live_shoal("token").out


def test_roles_are_set_one_at_a_time(live_shoal: Shoal) -> None:
    for name in ("lab", "art"):
        live_shoal("tenant", "add", name)
    live_shoal("user", "add", "ann", "--tenant", "lab")
    shown = live_shoal("user", "set", "ann", "--tenant", "art", "--role", "viewer").out
    assert shown == "ann: viewer in art, member in lab\n"
    assert_one_clear_line(result := live_shoal("token", "add", "ann"))
    assert "ann has roles in art, lab; name one of them" in result.err
    shown = live_shoal("user", "set", "ann", "--tenant", "lab", "--role", "none").out
    assert shown == "ann: viewer in art\n"


def test_a_token_that_leaked_is_rotated_or_removed_even_if_all_of_it_is_pasted(
    live_shoal: Shoal, cluster: Live
) -> None:
    live_shoal("tenant", "add", "lab")
    live_shoal("user", "add", "ann", "--tenant", "lab")
    leaked = live_shoal("token", "add", "ann").out.strip()
    rotated = live_shoal("token", "rotate", leaked)
    assert "expires in 90d" in rotated.err  # as before
    again = rotated.out.strip()
    assert again.split("_")[1] == leaked.split("_")[1]
    with Client(cluster.client.url, leaked) as client, pytest.raises(ShoalError, match="wrong"):
        client.me()
    removed = live_shoal("token", "remove", again)
    assert removed.out == f"removed the token {again.split('_')[1]}; it no longer grants access\n"
    with Client(cluster.client.url, again) as client, pytest.raises(ShoalError, match="wrong"):
        client.me()


def test_who_am_i(live_shoal: Shoal) -> None:
    assert live_shoal("whoami").out == "operator: admin in every tenant\n"
    assert json.loads(live_shoal("whoami", "--json").out)["user"] == "operator"


def test_every_answer_is_json_on_request(live_shoal: Shoal) -> None:
    assert json.loads(live_shoal("tenant", "add", "lab", "--json").out)["name"] == "lab"
    added = json.loads(live_shoal("user", "add", "ann", "--tenant", "lab", "--json").out)
    assert added["roles"] == {"lab": "member"}
    made = json.loads(live_shoal("token", "add", "ann", "--json").out)
    assert made["secret"].startswith(f"shoal_{made['token']['id']}_")
    for noun in ("tenant", "user", "token"):
        (view,) = json.loads(live_shoal(noun, "--json").out)
        assert "hash" not in view
    for noun, name in (("token", made["token"]["id"]), ("user", "ann"), ("tenant", "lab")):
        assert json.loads(live_shoal(noun, "remove", name, "--json").out)["id"] == name


def test_the_audit_log_shows_who_did_what_and_is_verified(live_shoal: Shoal) -> None:
    live_shoal("tenant", "add", "lab")
    assert_one_clear_line(live_shoal("tenant", "add", "lab"))
    again, added = live_shoal("audit", "-n", "2").out.splitlines()[1:]
    assert re.search(r"operator +every tenant +tenants.add +lab +done \(201\) +socket$", added)
    assert re.search(r"operator +every tenant +tenants.add +lab +refused \(422\) +socket$", again)
    shown = json.loads(live_shoal("audit", "--verb", "tenants.add", "--json").out)
    assert {entry["verb"] for entry in shown["entries"]} == {"tenants.add"}
    assert "has no such entry" in live_shoal("audit", "--user", "nobody").err
    assert re.search(
        r"unchanged: [\d,]+ lines\nnewest: number \d+, hash [0-9a-f]{64}\n",
        live_shoal("audit", "verify").out,
    )


def test_an_audit_log_that_was_changed_is_one_clear_line(
    shoal: Shoal, cluster: Live, tmp_path: Path
) -> None:
    for name in ("audit.log", "audit.mark"):
        shutil.copy(cluster.home.path / name, tmp_path / name)
    tmp_path.chmod(0o700)
    path = tmp_path / "audit.log"
    path.write_bytes(path.read_bytes().replace(b"operator", b"somebody", 1))
    assert_one_clear_line(result := shoal("audit", "verify", home=tmp_path))
    assert "not as it was written: line 1 of audit.log (number 1) was changed" in result.err


WRONG = [
    (["audit", "show", "--last", "0"], "--last: must be at least 1"),
    (["audit", "check"], "unknown command 'shoal audit check'; use one of show, verify"),
    (["audit", "verify", "--user", "ann"], "verify: takes no filter"),
    (["tenant", "ad", "lab"], "unknown command 'shoal tenant ad'; use one of list, add, remove"),
    (["tenant", "add"], "add: needs a name"),
    (["tenant", "list", "lab"], "list: takes no name"),
    (["tenant", "remove", "lab", "--uid", "7"], "--uid: only with add"),
    (["tenant", "add", "a b"], "NAME: 'a b' is not the name of a tenant; use at most 63"),
    (["tenant", "add", "default"], "is the operator's own"),
    (["tenant", "remove", "nope"], "there is no tenant nope"),
    (["user", "add", "ann"], "--tenant: a member needs one"),
    (["user", "add", "ann", "--role", "viewer"], "--tenant: a viewer needs one"),
    (["user", "add", "ann", "--role", "root"], "is not a role; use viewer, member or admin"),
    (["user", "add", "ann", "--tenant", "nope"], "there is no tenant nope"),
    (["user", "add", "operator", "--role", "admin"], "the person who started the cluster"),
    (["user", "set", "ann"], "set: needs --role"),
    (["user", "set", "ann", "--role", "none"], "where does ann lose the role?"),
    (["user", "set", "nope", "--role", "admin"], "there is no user nope"),
    (["user", "list", "--role", "admin"], "list: takes no --tenant and no --role"),
    (["token", "make"], "unknown command 'shoal token make'"),
    (["token", "add"], "operator is not a user; name one"),
    (["token", "add", "nope"], "there is no user nope"),
    (["token", "add", "x", "--expires", "soon"], "--expires: 'soon' is not a time"),
    (["token", "add", "x", "--expires", "0"], "--expires: must be between"),
    (["token", "rotate"], "rotate: needs the id of a token"),
    (["token", "remove", "../x"], "is not a token's id"),
    (["token", "remove", "zzzzzzzz"], "there is no token zzzzzzzz"),
    (["token", "list", "--expires", "1d"], "--expires: only with add and rotate"),
    (["token", "remove", "zzzzzzzz", "--note", "x"], "only with add"),
]


@pytest.mark.parametrize(("args", "words"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_what_is_written_wrongly_is_one_clear_line(
    args: list[str], words: str, live_shoal: Shoal
) -> None:
    assert_one_clear_line(result := live_shoal(*args))
    assert words in result.err
