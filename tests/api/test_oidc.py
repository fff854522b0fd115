"""Sign-in by OpenID Connect, against a provider over HTTP: who gets in, and as whom."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from harness.waiting import until

from shoal.client import Client, ShoalError
from shoal.model.identity import Role
from shoal.model.people import GroupRule, OidcConfig
from tests.api.openid import SECRET, FakeProvider, fake_provider, rsa_key
from tests.live.cluster import Live, live_cluster

GROUPS = {
    "team": GroupRule(tenant="lab"),
    "guests": GroupRule(tenant="lab", role=Role.VIEWER),
    "artists": GroupRule(tenant="art"),
    "platform": GroupRule(role=Role.ADMIN),
    "gone": GroupRule(tenant="no-such-tenant"),
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=1, gpus=1) as made:
        for tenant in ("lab", "art"):
            made.client.add_tenant(tenant)
        yield made


@pytest.fixture
def provider(live: Live) -> Iterator[FakeProvider]:
    with fake_provider() as made:
        live.client.set_oidc(config(made))
        yield made
    for user in live.client.users():
        live.client.remove_user(user.name)


def config(provider: FakeProvider) -> OidcConfig:
    return OidcConfig(
        issuer=provider.issuer, client_id="shoal", client_secret=SECRET, groups=GROUPS
    )


class Browser:
    """Keeps cookies per host, and follows one link at a time."""

    def __init__(self, live: Live) -> None:
        self.url = live.client.url
        self.cookies: dict[str, str] = {}

    def get(self, url: str) -> tuple[int, str, bytes]:
        """The status, where it leads, and the body."""
        where = urlsplit(url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
        ours = url.startswith(self.url)
        jar = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        path = where.path + (f"?{where.query}" if where.query else "")
        connection.request("GET", path, headers={"cookie": jar} if ours and jar else {})
        answer = connection.getresponse()
        body = answer.read()
        if ours:
            for line in answer.headers.get_all("set-cookie") or []:
                for name, morsel in SimpleCookie(line).items():
                    self.cookies[name] = morsel.value
        connection.close()
        return answer.status, answer.headers.get("location", ""), body

    def begin(self) -> str:
        """Up to the provider's answer: the address at which the browser comes back."""
        status, there, _ = self.get(f"{self.url}/v1/oidc/begin")
        assert status == 302
        status, back, _ = self.get(there)
        assert status == 302
        return back

    def sign_in(self) -> tuple[int, str]:
        status, where, body = self.get(self.begin())
        return status, where or json.loads(body)["message"]

    def me(self) -> dict[str, Any]:
        status, _, body = self.get(f"{self.url}/v1/me")
        return dict(json.loads(body)) if status == 200 else {"status": status}


def test_a_person_signs_in_on_the_page_with_the_roles_of_their_groups(
    live: Live, provider: FakeProvider
) -> None:
    browser = Browser(live)
    assert json.loads(browser.get(f"{browser.url}/v1/session")[2])["openid"] is True
    assert browser.sign_in() == (302, "/")
    me = browser.me()
    assert (me["user"], me["tenant"], me["role"]) == ("ann", "lab", "member")
    (token,) = live.client.tokens()
    assert token.until_ms - token.since_ms == 8 * 3600 * 1000
    newest = live.client.audit(limit=1, user="ann").entries[0]
    assert (newest.verb, newest.status, newest.tenant) == ("openid.callback", 302, "lab")
    provider.person["groups"] = ["guests", "artists"]
    other = Browser(live)
    other.sign_in()
    assert live.client.users()[0].roles == {"art": Role.MEMBER, "lab": Role.VIEWER}
    assert browser.me()["role"] == "viewer"  # what was given before has the new role, too


def test_a_provider_that_wants_the_secret_in_the_form_gets_it_there(
    live: Live, provider: FakeProvider
) -> None:
    provider.methods = ["client_secret_post"]
    live.client.set_oidc(config(provider))
    assert Browser(live).sign_in() == (302, "/")


def test_the_code_is_bound_to_a_verifier_that_only_the_head_knows(
    live: Live, provider: FakeProvider
) -> None:
    Browser(live).begin()
    (asked,) = provider.codes.values()
    assert asked["code_challenge_method"] == "S256"
    assert {"nonce", "state", "code_challenge"} <= set(asked)
    assert asked["redirect_uri"] == f"{live.client.url}/v1/oidc/callback"


def lie(**claims: Any) -> Callable[[FakeProvider], None]:
    return lambda provider: provider.lies.update(claims)


def unsigned(provider: FakeProvider) -> None:
    provider.alg = "none"


def signed_with_the_shared_secret(provider: FakeProvider) -> None:
    provider.alg, provider.signing_key = "HS256", SECRET * 2


def signed_by_somebody_else(provider: FakeProvider) -> None:
    provider.signing_key = rsa_key("somebody else's")


def signed_by_an_unknown_key(provider: FakeProvider) -> None:
    real, provider.kid = provider.jwks(), "k2"
    provider.jwks = lambda: real  # type: ignore[method-assign]


ATTACKS: list[tuple[Callable[[FakeProvider], None], str]] = [
    (lie(nonce="another"), "belongs to another sign-in"),
    (lie(nonce=None), "belongs to another sign-in"),
    (lie(aud="another-program"), "not valid: Audience doesn't match"),
    (lie(aud=["shoal", "x"], azp="x"), "is for another program"),
    (lie(iss="https://evil.example.com"), "not valid: Invalid issuer"),
    (lie(exp=1_000_000), "not valid: Signature has expired"),
    (lie(exp=None), "not valid: .*exp"),
    (lie(sub=None), "not valid: .*sub"),
    (lie(iat=4_000_000_000), "not valid: .*not yet valid"),
    (unsigned, "not valid: it is signed by none"),
    (signed_with_the_shared_secret, "not valid: it is signed by HS256"),
    (signed_by_somebody_else, "not valid: Signature verification failed"),
    (signed_by_an_unknown_key, "a key that the provider does not name"),
]


@pytest.mark.parametrize(("attack", "words"), ATTACKS)
def test_a_token_that_is_not_the_providers_for_us_and_now_lets_nobody_in(
    attack: Callable[[FakeProvider], None], words: str, live: Live, provider: FakeProvider
) -> None:
    attack(provider)
    browser = Browser(live)
    status, message = browser.sign_in()
    assert status == 401
    assert re.search(words, message), message
    assert browser.me() == {"status": 401}
    assert live.client.users() == []


def test_a_way_back_works_once_and_only_in_the_browser_that_began(
    live: Live, provider: FakeProvider
) -> None:
    victim, thief = Browser(live), Browser(live)
    back = victim.begin()
    thief.begin()  # has a cookie, but of another sign-in
    status, _, body = thief.get(back)
    assert (status, "not begun in this browser" in json.loads(body)["message"]) == (401, True)
    assert thief.me() == {"status": 401}
    assert victim.get(back)[0] == 302
    assert victim.me()["user"] == "ann"
    status, _, body = victim.get(back)  # replayed
    assert (status, "is over" in json.loads(body)["message"]) == (401, True)
    state = parse_qs(urlsplit(back).query)["state"][0]
    assert victim.get(f"{victim.url}/v1/oidc/callback?state={state[:-1]}x&code=1")[0] == 401
    assert len(provider.asked) == 1


@pytest.mark.parametrize("groups", [[], ["strangers"], ["gone"], "team-x", None, {"team": 1}])
def test_whoever_is_in_no_mapped_group_does_not_get_in(
    groups: object, live: Live, provider: FakeProvider
) -> None:
    provider.person["groups"] = groups
    browser = Browser(live)
    status, message = browser.sign_in()
    assert (status, "none of your groups has a role" in message) == (403, True)
    assert live.client.users() == []


def test_whoever_loses_their_groups_loses_what_they_had_at_the_next_sign_in(
    live: Live, provider: FakeProvider
) -> None:
    browser = Browser(live)
    browser.sign_in()
    provider.person["groups"] = []
    assert Browser(live).sign_in()[0] == 403
    assert browser.me() == {"status": 401}


def test_a_name_at_the_provider_is_not_a_way_to_become_a_local_user_or_another_person(
    live: Live, provider: FakeProvider
) -> None:
    live.client.add_user("root", {"*": Role.ADMIN})
    for name, words in (
        ("root", "root is somebody else"),
        ("operator", "the person who started"),
        ("../x y", "cannot be the name of a user"),
        ("", "has no preferred_username"),
    ):
        provider.person["preferred_username"] = name
        status, message = Browser(live).sign_in()
        assert (status, words in message) == (403, True), message
    provider.person["preferred_username"] = "ann"
    assert Browser(live).sign_in()[0] == 302
    provider.person["sub"] = "2"
    assert "ann is somebody else" in Browser(live).sign_in()[1]


def test_an_admin_group_makes_an_admin(live: Live, provider: FakeProvider) -> None:
    provider.person["groups"] = ["platform", "team"]
    browser = Browser(live)
    browser.sign_in()
    assert (browser.me()["tenant"], browser.me()["role"]) == ("*", "admin")
    assert browser.get(f"{browser.url}/v1/users")[0] == 200


def test_a_device_gets_a_token_when_the_person_has_agreed(
    live: Live, provider: FakeProvider
) -> None:
    with Client(live.client.url, "") as device:
        begun = device.begin_device()
        assert (begun.user_code, begun.url) == ("WDJB-MJHT", f"{provider.issuer}/activate")
        before = live.client.audit(limit=1).head
        assert device.poll_device(begun.handle).secret == ""
        assert live.client.audit(limit=1).head == before  # waiting is not worth a line
        provider.agreed = True
        secret = device.poll_device(begun.handle).secret
        with Client(live.client.url, secret) as ann:
            assert (ann.me().user, ann.me().tenant) == ("ann", "lab")
        with pytest.raises(ShoalError, match="this sign-in is over"):
            device.poll_device(begun.handle)
    told = (live.home.path / "audit.log").read_text()
    assert begun.handle not in told
    assert secret.split("_", 2)[2] not in told
    assert SECRET not in told


def test_settings_are_checked_with_the_provider_and_never_show_the_secret(
    live: Live, provider: FakeProvider
) -> None:
    shown = str(live.client.request("GET", "/v1/oidc", dict))
    assert SECRET not in shown
    assert "'has_secret': True" in shown
    assert (live.home.path / "oidc.json").stat().st_mode & 0o777 == 0o600
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"issuer": "http://example.com"}, 422, "must begin with https://"),
        ({"issuer": f"{provider.issuer}/other"}, 502, "speaks for"),
        ({"issuer": "http://127.0.0.1:1"}, 502, "does not answer"),
        ({"groups": {}}, 422, "nobody could sign in"),
        ({"groups": {"x": {"role": "member"}}}, 422, "a member belongs to a tenant"),
        ({"groups": {"x": {"role": "admin", "tenant": "lab"}}}, 422, "one for every tenant"),
    ]
    for fields, status, words in wrong:
        body = json.dumps(
            {"issuer": provider.issuer, "client_id": "shoal", "groups": {"a": {"tenant": "lab"}}}
            | fields
        ).encode()
        with pytest.raises(ShoalError, match=words) as caught:
            live.client.request("PUT", "/v1/oidc", dict, body)
        assert caught.value.status == status
    live.kill_controller()
    assert live.client.oidc().issuer == provider.issuer  # as it was, in the next controller
    (live.home.path / "oidc.json").write_bytes(b"{")
    live.kill_controller()
    until(lambda: any("oidc.json" in t for t in live.client.status().alarms))
    live.client.set_oidc(config(provider))
    assert live.client.status().alarms == ()
    live.client.remove_oidc()
    with pytest.raises(ShoalError, match="has no sign-in by OpenID Connect"):
        live.client.oidc()
    assert Browser(live).get(f"{live.client.url}/v1/oidc/begin")[0] == 404
