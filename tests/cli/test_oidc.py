"""`shoal oidc` and `shoal login --oidc`: settings from a file, and a sign-in without a token."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from harness.waiting import until

from tests.api.openid import SECRET, FakeProvider, fake_provider
from tests.cli.conftest import Shoal, assert_one_clear_line
from tests.cli.test_login import _own_folder, far, laptop, line_of, log_in
from tests.live.cluster import Live

__all__ = ["_own_folder", "far", "laptop"]  # fixtures

SETTINGS = """
issuer: {issuer}
client_id: shoal
client_secret: {secret}
groups:
  team: {{tenant: lab}}
  platform: {{role: admin}}
"""


@pytest.fixture
def provider() -> Iterator[FakeProvider]:
    with fake_provider() as made:
        yield made


@pytest.fixture
def settings(provider: FakeProvider, tmp_path: Path) -> Path:
    path = tmp_path / "provider.yaml"
    path.write_text(SETTINGS.format(issuer=provider.issuer, secret=SECRET))
    return path


def test_whoever_signs_in_by_a_code_is_who_they_are_at_the_provider(
    laptop: Shoal, far: Live, provider: FakeProvider, settings: Path
) -> None:
    log_in(laptop, far, "--context", "admin")
    assert "nobody" not in laptop("tenant", "add", "lab").err
    shown = laptop("oidc", "set", str(settings)).out
    assert f"provider.yaml is in force: people sign in through {provider.issuer}" in shown
    shown = laptop("oidc").out
    assert f"{provider.issuer} (client shoal with a secret)" in shown
    assert "team      lab           member" in shown
    assert SECRET not in shown + laptop("oidc", "--json").out
    where = urlsplit(line_of(far)[1])
    unverified = ssl._create_unverified_context()
    browser = http.client.HTTPSConnection("127.0.0.1", where.port, context=unverified, timeout=60)
    browser.request("GET", "/v1/oidc/begin")
    with browser.getresponse() as answer:
        back = parse_qs(urlsplit(answer.headers["location"]).query)["redirect_uri"]
        assert back == [f"https://127.0.0.1:{where.port}/v1/oidc/callback"]
        assert "Secure" in answer.headers["set-cookie"]
    browser.close()

    def agree() -> None:
        until(lambda: bool(provider.asked), "the head asks the provider")
        provider.agreed = True

    agreeing = threading.Thread(target=agree)
    agreeing.start()
    result = laptop(*line_of(far), "--oidc", "--context", "me")
    agreeing.join()
    assert f"open {provider.issuer}/activate in a browser, and enter the code WDJB" in result.err
    assert "as ann; the context is me" in result.out, result.err
    assert laptop("whoami").out.startswith("ann: member in lab, token ")
    assert json.loads(laptop("whoami", "--json").out)["until_ms"] > 0
    assert_one_clear_line(laptop("oidc", "remove"))  # not by a member
    removed = laptop("oidc", "remove", "--context", "admin")
    assert removed.out.startswith(f"sign-in through {provider.issuer} is disabled")
    assert_one_clear_line(result := laptop(*line_of(far), "--oidc", "--context", "me"))
    assert "this cluster has no sign-in by OpenID Connect" in result.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("issuer: ", "issuer: ftp://"), "issuer: must begin with https://"),
        (
            ("client_id: shoal", "client: shoal"),
            "there is no field 'client'; did you mean 'client_id'?",
        ),
        (("tenant: lab", "tenants: lab"), "did you mean 'tenant'?"),
        (("{tenant: lab}", "lab"), "groups.team: must be a table"),
        (("{tenant: lab}", "{tenant: lab, role: boss}"), "groups"),
        (("{role: admin}", "{}"), "groups.platform: a member belongs to a tenant"),
        (("client_id: shoal", ""), "client_id"),
    ],
)
def test_settings_that_are_wrong_are_one_clear_line(
    change: tuple[str, str], words: str, shoal: Shoal, settings: Path
) -> None:
    settings.write_text(settings.read_text().replace(*change))
    assert_one_clear_line(result := shoal("oidc", "set", str(settings)))
    assert words in result.err


def test_what_is_written_wrongly_is_one_clear_line(shoal: Shoal, laptop: Shoal) -> None:
    for args, words in (
        (["oidc", "set"], "set: needs a file"),
        (["oidc", "show", "x.yaml"], "show: takes no file"),
        (["oidc", "put"], "unknown command 'shoal oidc put'"),
        (["oidc", "set", "x.txt"], "name a .yaml, .toml or .json file"),
    ):
        assert_one_clear_line(result := shoal(*args))
        assert words in result.err
    local = ["login", "http://127.0.0.1:1"]
    for args, words in (
        ([*local, "--oidc", "--token-file", "x"], "leave --token-file out"),
        ([*local, "--tenant", "x"], "--tenant: has no effect without --oidc"),
    ):
        assert_one_clear_line(result := laptop(*args))
        assert words in result.err
