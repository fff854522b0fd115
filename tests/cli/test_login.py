"""Logging in to a cluster on another machine, and choosing which cluster commands use."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import shoal as package
from shoal.cli.app import call
from shoal.client import Address, Client, ShoalError, contexts, transport
from shoal.client.transport import WrongCertificate
from shoal.control.home import ClusterConfig
from tests.cli.conftest import Result, Shoal, assert_one_clear_line
from tests.live.cluster import Live, live_cluster, virtual_nodes


@pytest.fixture(scope="module")
def far() -> Iterator[Live]:
    """A cluster that other machines reach."""
    config = ClusterConfig(nodes=virtual_nodes(1, 1), port=0, host="0.0.0.0")
    with live_cluster(config=config) as live:
        yield live


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SHOAL_CONTEXT", "")


@pytest.fixture
def laptop(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shoal:
    """The command line of somebody who has no cluster at home."""

    def run(*args: str) -> Result:
        monkeypatch.setenv("SHOAL_HOME", "")
        monkeypatch.setenv("SHOAL_CONTEXT", "")
        capsys.readouterr()
        code = call(list(args))
        return Result(code, *capsys.readouterr())

    return run


def line_of(far: Live) -> list[str]:
    """What the head prints for other machines, without `shoal`."""
    address = msgspec.json.decode(far.home.address.read_bytes(), type=Address)
    return ["login", address.url, "--fingerprint", address.fingerprint]


def log_in(laptop: Shoal, far: Live, *more: str) -> Result:
    return laptop(*line_of(far), "--token-file", str(far.home.token), *more)


def kept(path: Path) -> Path:
    return path / "config" / "shoal" / "contexts.json"


def test_who_logs_in_uses_the_cluster_from_then_on(
    laptop: Shoal, far: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = log_in(laptop, far, "--context", "lab")
    assert (result.code, "as operator; the context is lab" in result.out) == (0, True), result.err
    assert laptop("run", "--wait", "--", "echo", "hello").out == "hello\n"
    assert laptop("status", "--json").code == 0
    assert kept(tmp_path).stat().st_mode & 0o777 == 0o600
    listed = json.loads(laptop("context", "--json").out)
    assert (listed["used"], "chose it" in listed["why"]) == ("lab", True)
    assert far.home.read_token() not in result.out + result.err + laptop("context").out
    link = laptop("page").out
    assert link.startswith(line_of(far)[1]), link
    with package.Client(context="lab") as client:
        assert client.run("true").id
    for name in ("SHOAL_HOME", "SHOAL_CONTEXT"):
        monkeypatch.setenv(name, "")
    with package.Client() as client:
        assert client.url == line_of(far)[1], "the cluster that the command uses"


def test_which_cluster_a_command_uses(laptop: Shoal, far: Live, tmp_path: Path) -> None:
    log_in(laptop, far, "--context", "lab")

    def used(*args: str) -> tuple[str, str]:
        told = json.loads(laptop(*args, "context", "--json").out)
        return told["used"], told["why"].split()[0]

    assert used() == ("lab", "shoal")
    assert used("--home", str(tmp_path)) == ("local", "--home")
    assert used("--context", "lab") == ("lab", "--context")
    assert laptop("context", "use", "local").code == 0
    assert used() == ("local", "no")
    assert used("--context", "lab") == ("lab", "--context")
    assert laptop("context", "use", "lab").code == 0
    environment = {"SHOAL_HOME": str(tmp_path), "SHOAL_CONTEXT": ""}
    assert told_by_process(environment)["used"] == "local"
    assert told_by_process({**environment, "SHOAL_CONTEXT": "lab"})["used"] == "lab"


def told_by_process(environment: dict[str, str]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "shoal.main", "context", "--json"],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


def test_a_wrong_fingerprint_is_refused_and_the_token_stays_here(laptop: Shoal, far: Live) -> None:
    words = line_of(far)
    words[-1] = words[-1][:-4] + ("0000" if words[-1][-4:] != "0000" else "1111")
    result = laptop(*words, "--token-file", str(far.home.token))
    assert_one_clear_line(result)
    assert "someone is between" in result.err
    assert contexts.load().contexts == {}


def test_without_a_fingerprint_nothing_is_trusted_silently(laptop: Shoal, far: Live) -> None:
    result = laptop("login", line_of(far)[1], "--token-file", str(far.home.token))
    assert_one_clear_line(result)
    assert line_of(far)[-1] in result.err
    assert "--fingerprint" in result.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["login"], "URL"),
        (["login", "ftp://head"], "not an address"),
        (["login", "https://head:99999"], "not an address"),
        (["login", "https://user:pw@head"], "not an address"),
        (["login", "http://192.0.2.9:7700"], "for all to read"),
        (["login", "https://head:1", "--fingerprint", "sha256:12"], "64 digits"),
        (["login", "https://127.0.0.1:1", "--fingerprint", "0" * 64], "no response"),
        (["login", "--show"], "no cluster is up"),
        (["logout"], "needs no login"),
        (["context", "use", "nowhere"], "no context 'nowhere'"),
        (["context", "use"], "needs the name"),
        (["context", "remove", "local"], "local is the home"),
        (["context", "drop"], "unknown command 'shoal context drop'"),
        (["--context", "nowhere", "ps"], "no context 'nowhere'"),
        (["--context", "nowhere", "--home", "/nowhere", "ps"], "cannot be combined"),
        (["--context", "nowhere", "up"], "for the cluster of this machine"),
        (["up", "--key", "x"], "--key"),
        (["up", "--certificate", "/nowhere.pem"], "cannot read /nowhere.pem"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    laptop: Shoal, words: list[str], complaint: str, tmp_path: Path
) -> None:
    more = ["--home", str(tmp_path / "home")] if words[0] == "up" or "--show" in words else []
    result = laptop(*words, *more)
    assert_one_clear_line(result)
    assert complaint in result.err


@pytest.mark.parametrize("url", ["HTTPS://HEAD:7700", "https://head:7700/", "httpS://Head:7700"])
def test_an_address_is_secure_however_it_is_written(url: str) -> None:
    where = transport.at(url, "secret")
    assert (where.url, where.secure) == ("https://head:7700", True)


def test_who_starts_a_cluster_hears_that_commands_use_another(
    laptop: Shoal, far: Live, tmp_path: Path
) -> None:
    log_in(laptop, far, "--context", "lab")
    told = laptop("up", "--home", str(far.home.path))
    assert "shoal context use local" in told.err, told.err


def test_a_token_that_ended_is_said_with_the_way_to_log_in_again(laptop: Shoal, far: Live) -> None:
    log_in(laptop, far, "--context", "lab")
    with contexts.changing() as kept:
        kept.contexts["lab"] = msgspec.structs.replace(kept.contexts["lab"], token="ended")
    result = laptop("ps")
    assert_one_clear_line(result)
    assert "shoal login --context lab" in result.err


def test_a_token_that_is_wrong_is_not_kept(laptop: Shoal, far: Live, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("shoal_00000000_wrong")
    result = laptop(*line_of(far), "--token-file", str(tmp_path / "token"))
    assert_one_clear_line(result)
    assert contexts.load().contexts == {}


def test_who_logs_out_logs_in_again_without_the_fingerprint(laptop: Shoal, far: Live) -> None:
    log_in(laptop, far, "--context", "lab")
    assert laptop("logout").code == 0
    result = laptop("ps")
    assert_one_clear_line(result)
    assert "shoal login --context lab" in result.err
    assert laptop("login", "--token-file", str(far.home.token)).code == 0
    assert laptop("ps").code == 0
    assert laptop("context", "remove", "lab").code == 0
    assert contexts.load() == contexts.Contexts()


def test_contexts_that_others_could_read_or_that_are_damaged_are_refused(
    laptop: Shoal, far: Live, tmp_path: Path
) -> None:
    log_in(laptop, far)
    kept(tmp_path).chmod(0o644)
    result = laptop("ps")
    assert_one_clear_line(result)
    assert "chmod 600" in result.err
    kept(tmp_path).chmod(0o600)
    kept(tmp_path).write_text('{"current": 3}')
    result = laptop("ps")
    assert_one_clear_line(result)
    assert "is damaged" in result.err
    assert laptop("ps", "--home", str(far.home.path)).code == 0, "a home needs no contexts"


def test_two_logins_at_the_same_moment_are_both_kept(far: Live, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "shoal.main", *line_of(far)]
    words += ["--token-file", str(far.home.token)]
    both = [subprocess.Popen([*words, "--context", name]) for name in ("one", "two", "three")]
    assert [process.wait(120) for process in both] == [0, 0, 0]
    assert set(contexts.load().contexts) == {"one", "two", "three"}


def test_the_token_is_read_from_stdin_and_is_never_an_argument(far: Live) -> None:
    words = [sys.executable, "-m", "shoal.main", *line_of(far), "--context", "lab"]
    done = subprocess.run(words, input=far.home.token.read_bytes(), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert far.home.read_token().encode() not in done.stdout + done.stderr
    assert contexts.find("lab").token == far.home.read_token()


def test_a_certificate_for_another_name_is_refused(far: Live) -> None:
    where = transport.at(line_of(far)[1], "")
    anchor = transport.presented(where).anchor
    url = f"https://127.0.0.7:{where.port}"
    with (
        pytest.raises(WrongCertificate, match=r"is for .*localhost.*, not for 127\.0\.0\.7"),
        Client(url, far.home.read_token(), certificate=anchor) as client,
    ):
        client.status()


def test_http_to_the_tls_port_gets_one_line(far: Live) -> None:
    where = transport.at(line_of(far)[1], "")
    with (
        pytest.raises(ShoalError, match="use https://"),
        Client(f"http://127.0.0.1:{where.port}", "t") as client,
    ):
        client.status()


def test_names_in_the_certificate_are_names_of_the_controller(far: Live) -> None:
    where = transport.at(line_of(far)[1], "")
    context = transport.trust_in(transport.presented(where).anchor)

    def status(name: str) -> int:
        link = http.client.HTTPSConnection("localhost", where.port, timeout=60, context=context)
        with contextlib.closing(link):
            link.request("GET", "/v1/certificate", headers={"host": name})
            return link.getresponse().status

    assert status(where.host) == status("localhost:7700") == 200
    assert status("evil.example") == 421


def test_old_versions_of_tls_are_refused(far: Live) -> None:
    where = transport.at(line_of(far)[1], "")

    def connect(version: ssl.TLSVersion) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = version
        link = http.client.HTTPSConnection("localhost", where.port, timeout=60, context=context)
        with contextlib.closing(link):
            link.connect()

    connect(ssl.TLSVersion.TLSv1_3)
    connect(ssl.TLSVersion.TLSv1_2)
    with pytest.raises(ssl.SSLError):
        connect(ssl.TLSVersion.TLSv1_1)
