"""Sign-in by OpenID Connect: who gets in, and as whom. By npm's oidc-provider, which is not ours,
and by a small provider that lies on request."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from harness import openid
from harness.waiting import until

from shoal.api.oidc_provider import DEVICE_GRANT, Provider
from shoal.api.problems import Refusal
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


ODD_SECRET = "a secret/with: +%"  # what a form and a header write differently
PEOPLE = {
    "ann": {"sub": "ann", "preferred_username": "ann", "groups": ["team"]},
    "eve": {"sub": "eve", "preferred_username": "eve", "groups": ["strangers"]},
}


@pytest.fixture(scope="module")
def foreign_server(live: Live) -> Iterator[openid.Provider]:
    if missing := openid.missing():
        pytest.skip(missing)
    with openid.provider(clients=registered(live), people=PEOPLE, algorithms=["RS256"]) as made:
        yield made


@pytest.fixture
def foreign(live: Live, foreign_server: openid.Provider) -> Iterator[openid.Provider]:
    live.client.set_oidc(foreign_config(foreign_server))
    yield foreign_server
    for user in live.client.users():
        live.client.remove_user(user.name)


def registered(live: Live, algorithm: str = "RS256") -> list[dict[str, Any]]:
    """Our client at the foreign provider, and a client of somebody else."""
    return [
        {
            "client_id": name,
            "client_secret": ODD_SECRET,
            "redirect_uris": [f"{live.client.url}/v1/oidc/callback"],
            "grant_types": ["authorization_code", DEVICE_GRANT],
            "id_token_signed_response_alg": algorithm,
        }
        for name in ("shoal", "other")
    ]


def foreign_config(provider: openid.Provider, client: str = "shoal") -> OidcConfig:
    return OidcConfig(
        issuer=provider.issuer, client_id=client, client_secret=ODD_SECRET, groups=GROUPS
    )


def foreign_answer(live: Live, person: str, browser: openid.Browser) -> str:
    """Where the provider sends a person back to who has signed in on its own pages."""
    url = live.client.url
    return browser.sign_in(f"{url}/v1/oidc/begin", person, f"{url}/v1/oidc/callback")


def test_a_person_signs_in_at_a_provider_that_is_not_ours_and_out_again(
    live: Live, foreign: openid.Provider
) -> None:
    browser, stranger = openid.Browser(), openid.Browser()
    browser.get(foreign_answer(live, "ann", browser))
    browser.get(f"{live.client.url}/v1/session")
    session = json.loads(browser.text)
    assert (session["user"], session["tenant"], session["role"]) == ("ann", "lab", "member")
    headers = {
        "cookie": browser.cookies_for(f"{live.client.url}/v1/"),
        "origin": live.client.url,
        "x-shoal-csrf": session["csrf"],
    }
    assert status_of(live, "POST", "/v1/session/end", headers) == 200
    assert status_of(live, "GET", "/v1/jobs", headers) == 401  # for who kept the cookie, too
    stranger.get(foreign_answer(live, "eve", stranger))
    assert (stranger.status, "none of your groups" in stranger.text) == (403, True)


def status_of(live: Live, method: str, path: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection(urlsplit(live.client.url).netloc, timeout=60)
    connection.request(method, path, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES256", "EdDSA"])
def test_a_provider_may_exchange_its_keys_at_any_time(
    algorithm: str, live: Live, foreign: openid.Provider
) -> None:
    browser = openid.Browser()
    browser.get(foreign_answer(live, "ann", browser))
    foreign.change(clients=registered(live, algorithm), algorithms=["RS256", algorithm])
    browser.get(foreign_answer(live, "ann", browser))
    assert (browser.status, urlsplit(browser.url).path) == (200, "/")


def test_a_code_or_a_token_of_another_sign_in_or_another_program_is_worth_nothing(
    live: Live, foreign: openid.Provider
) -> None:
    ours, other = Provider(foreign_config(foreign)), Provider(foreign_config(foreign, "other"))
    url, browser = live.client.url, openid.Browser()
    back = f"{url}/v1/oidc/callback"

    def code_for(provider: Provider, verifier: str) -> str:
        there = provider.way_to_sign_in(back, "state", "nonce", verifier)
        return parse_qs(urlsplit(browser.sign_in(there, "ann", back)).query)["code"][0]

    verifier = "v" * 43
    stolen = code_for(ours, verifier)
    with pytest.raises(Refusal, match=r"the provider refused the code: .*grant"):
        ours.redeem(stolen, back, "w" * 43, "nonce")  # whoever saw it has no verifier
    used = code_for(ours, verifier)
    assert ours.redeem(used, back, verifier, "nonce").groups == ["team"]
    with pytest.raises(Refusal, match="the provider refused the code"):
        ours.redeem(used, back, verifier, "nonce")
    with pytest.raises(Refusal, match="belongs to another sign-in"):
        ours.redeem(code_for(ours, verifier), back, verifier, "another nonce")
    code = code_for(other, verifier)
    with pytest.raises(Refusal, match="the provider refused the code"):
        ours.redeem(code, back, verifier, "nonce")
    form = {"grant_type": "authorization_code", "redirect_uri": back, "code_verifier": verifier}
    endpoint = other.discovery().token_endpoint
    _, answer = other._ask(endpoint, {**form, "code": code_for(other, verifier)})
    assert other.believe(answer["id_token"], "nonce")["sub"] == "ann"
    with pytest.raises(Refusal, match="Audience doesn't match"):
        ours.believe(answer["id_token"], "nonce")


def test_what_the_foreign_provider_says_is_shown_and_must_be_from_it(
    live: Live, foreign: openid.Provider
) -> None:
    browser = openid.Browser()
    browser.get(f"{live.client.url}/v1/oidc/begin")
    (cancel,) = re.findall('href="([^"]*/abort)"', browser.text)
    browser.get(cancel)
    assert json.loads(browser.text)["message"] == (
        "the provider refused: End-User aborted interaction"
    )
    answer = foreign_answer(live, "ann", browser)
    for forged in (answer.split("&iss=")[0], f"{answer}.example.com"):
        attempt = foreign_answer(live, "ann", browser)
        state = parse_qs(urlsplit(attempt).query)["state"][0]
        browser.get(re.sub("state=[^&]*", f"state={state}", forged))
        assert "not from the provider that was asked" in browser.text


def test_a_device_signs_in_at_the_foreign_provider(live: Live, foreign: openid.Provider) -> None:
    with Client(live.client.url, "") as device:
        begun = device.begin_device()
        browser = openid.Browser()
        browser.get(begun.url)
        browser.submit(user_code=begun.user_code)
        browser.submit()  # the code is shown again, to be compared
        while 'name="prompt"' in browser.text:
            browser.submit(login="ann", password="any")
        assert "Sign-in Success" in browser.text
        secret = device.poll_device(begun.handle).secret
        with Client(live.client.url, secret) as ann:
            assert (ann.me().user, ann.me().tenant) == ("ann", "lab")


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
    assert abs(token.until_ms - token.since_ms - 8 * 3600 * 1000) < 60_000
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


def test_claims_may_come_from_the_userinfo_endpoint_but_only_of_the_same_person(
    live: Live, provider: FakeProvider
) -> None:
    provider.userinfo = {"sub": "1", "preferred_username": "ann", "groups": ["team"]}
    provider.person = {"sub": "1"}
    browser = Browser(live)
    assert browser.sign_in() == (302, "/")
    assert browser.me()["tenant"] == "lab"
    provider.userinfo |= {"sub": "2", "groups": ["platform"]}
    assert Browser(live).sign_in() == (
        401,
        "the provider named another person than its token does",
    )
    provider.userinfo |= {"sub": "1"}
    provider.person = {"sub": "1", "groups": ["guests"]}  # what is signed outweighs the rest
    assert browser.sign_in()[0] == 302
    assert browser.me()["role"] == "viewer"


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
        ("", "the provider gave no preferred_username"),
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
