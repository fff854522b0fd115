"""A busy cluster with secrets: afterwards their values are in no file, answer or command line."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from harness.waiting import until

from shoal.client import Client, ShoalError
from shoal.machine.kernel import memory_folder
from shoal.model.identity import Role
from shoal.model.people import NewToken
from tests.live.cluster import Live, all_pids, live_cluster
from tests.needs import need_root

VALUE = "canary-of-ada-93c1"
OTHER = "canary-of-bob-77d0"
SHELL = "canary-in-the-shell"
FORBIDDEN = [
    text
    for value in (VALUE, OTHER)
    for text in (
        value.encode(),
        base64.b64encode(value.encode()).rstrip(b"="),
        value.encode().hex().encode(),
    )
]
PRINTS = (
    "import base64, os; value = open(os.environ['SHOAL_SECRETS'] + '/file').read();"
    "print('file', value); print('variable', os.environ['VAR']);"
    "print(base64.b64encode(value.encode()).decode()); print(value.encode().hex())"
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """The operator has secrets in the shell that starts the cluster."""
    os.environ["OPERATOR_TOKEN"] = os.environ["LC_TOKEN"] = SHELL
    os.environ["NCCL_API_KEY"] = SHELL
    try:
        with live_cluster(nodes=2, gpus=2) as cluster:
            cluster.client.set_secret("file", VALUE.encode())
            cluster.client.set_secret("var", OTHER.encode() + b"\n")
            yield cluster
    finally:
        for name in ("OPERATOR_TOKEN", "LC_TOKEN", "NCCL_API_KEY"):
            del os.environ[name]


def python(live: Live, script: str, **fields: object) -> str:
    fields = {"secrets": ("file", "var=VAR"), **fields}
    return live.client.submit(live.spec(sys.executable, "-c", script, **fields)).id  # type: ignore[arg-type]


def answers(live: Live) -> bytes:
    """Everything that a reader with the operator's token can get."""
    token = live.home.token.read_text().strip()
    paths = ["jobs?finished=true", "events?limit=10000", "status", "nodes", "secrets", "services"]
    paths += ["metrics", "policy", "samples", "queue"]
    for job in live.client.jobs(finished=True):
        paths += [
            f"jobs/{job.id}{part}" for part in ("", "/why", "/logs", "/explanation", "/series")
        ]
        paths += [f"jobs/{job.id}/logs?attempt={number}" for number in range(1, job.attempt + 1)]
    found = []
    for path in paths:
        where = f"{live.client.url}/{path}" if path == "metrics" else f"{live.client.url}/v1/{path}"
        with urlopen(Request(where, headers={"Authorization": f"Bearer {token}"})) as answer:
            found.append(answer.read())
    stream = Request(f"{live.client.url}/v1/stream", headers={"Authorization": f"Bearer {token}"})
    with urlopen(stream) as answer:  # the page's feed begins with everything
        found.append(answer.read1(1 << 20))
    return b"".join(found)


def leaks(live: Live) -> list[str]:
    """Where a value can be read, in any of its usual encodings."""
    found = []
    for path in live.home.path.rglob("*"):
        if path.is_file() and path.name != "output":
            data = path.read_bytes()
            found += [f"{path}: {text!r}" for text in FORBIDDEN if text in data]
    said = answers(live)
    assert len(said) > 10_000, "it has read something"
    found += [f"an answer: {text!r}" for text in FORBIDDEN if text in said]
    for pid in all_pids():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        found += [f"the command line of {pid}" for text in FORBIDDEN if text in line]
    return found


def left_in_memory(live: Live) -> list[Path]:
    roots = [memory_folder(node) for node in live.home.nodes.iterdir()]
    return [path for root in roots if root for path in root.rglob("*") if path.is_file()]


def test_after_a_busy_run_the_values_are_nowhere(live: Live) -> None:
    jobs = {
        "prints": python(live, PRINTS),
        "crashes": python(live, f"{PRINTS}; raise SystemExit('no access with ' + value)"),
        "hangs": python(live, f"{PRINTS}; import sys, time; sys.stdout.flush(); time.sleep(600)"),
        "gang": python(live, PRINTS, members=3),
        "retries": python(live, f"{PRINTS}; raise ValueError(value)", retries=1, backoff_ms=1),
        "floods": python(
            live, f"{PRINTS}\nfor _ in range(50_000): print(value, os.environ['VAR'])"
        ),
    }
    live.wait(jobs["hangs"], "running")
    for name in ("prints", "gang", "floods"):
        assert live.wait(jobs[name], timeout_s=120) == "succeeded", live.client.why(jobs[name])
    for name in ("crashes", "retries"):
        assert live.wait(jobs[name], timeout_s=120) == "failed"
    until(lambda: "variable" in live.output(jobs["hangs"]))
    assert leaks(live) == [], "while one is running"
    live.client.cancel(jobs["hangs"])
    live.wait(jobs["hangs"])
    text = live.output(jobs["prints"])
    assert text.splitlines()[:2] == [f"file {'*' * len(VALUE)}", f"variable {'*' * len(OTHER)}"]
    assert f"no access with {'*' * len(VALUE)}" in live.client.job(jobs["crashes"]).why
    assert leaks(live) == []
    until(lambda: left_in_memory(live) == [])


def test_an_agent_and_a_controller_that_are_killed_leave_nothing(live: Live) -> None:
    """With the output of a running member under way, and with members that are about to start."""
    script = f"{PRINTS}\nimport time\nwhile True: print(value, flush=True); time.sleep(0.001)"
    job = python(live, script)
    live.wait(job, "running")
    live.kill_controller()
    node = live.client.job(job).nodes[0]
    until(lambda: len(live.output(job)) > 1000)
    live.kill_agent(node)
    started = [python(live, PRINTS) for _ in range(4)]
    live.kill_controller()
    for one in started:
        assert live.wait(one, timeout_s=120) == "succeeded"
    until(lambda: live.client.job(job).attempt == 2)
    live.wait(job, "running")
    live.client.cancel(job)
    live.wait(job)
    until(lambda: left_in_memory(live) == [])
    assert leaks(live) == []


def test_setting_a_secret_again_takes_effect_with_the_next_attempt(live: Live) -> None:
    live.client.set_secret("turning", b"one")
    script = "import os; print(len(os.environ['TURN']), flush=True); import time; time.sleep(600)"
    job = python(live, script, secrets=("turning=TURN",))
    live.wait(job, "running")
    until(lambda: live.output(job, attempt=1) == "3\n")
    assert live.client.set_secret("turning", b"second").version == 2
    assert live.client.secrets()[1].jobs == 1
    live.client.requeue(job)
    until(lambda: live.client.job(job).attempt == 2)
    until(lambda: live.output(job, attempt=2) == "6\n")
    assert live.output(job, attempt=1) == "3\n"
    live.client.remove_secret("turning")
    live.client.requeue(job)
    assert live.wait(job, timeout_s=120) == "failed"
    why = live.client.job(job).why
    assert "cannot get its secrets: default has no secret turning; set it with" in why
    with pytest.raises(ShoalError, match="has no secret turning"):
        live.client.requeue(job)


def test_a_secret_that_is_set_while_jobs_start_is_whole_in_each_of_them(live: Live) -> None:
    values = [f"{number:04d}".encode() * 4_000 for number in range(40)]
    known = {hashlib.sha256(value).hexdigest() for value in values}
    live.client.set_secret("moving", values[0])
    read = "sha256sum < $SHOAL_SECRETS/moving"
    jobs = []
    with Client.at_home(live.home.path) as other:
        for number, value in enumerate(values):
            other.set_secret("moving", value)
            if number % 4 == 0:
                jobs.append(live.run(read, secrets=("moving",), members=3))
    for job in jobs:
        assert live.wait(job, timeout_s=120) == "succeeded"
        for member in range(3):
            assert live.output(job, member).split()[0] in known
    assert {one.name: one.version for one in live.client.secrets()}["moving"] == 41


def test_the_operators_shell_reaches_no_job(live: Live) -> None:
    job = live.client.submit(live.spec("env")).id
    assert live.wait(job) == "succeeded"
    assert SHELL not in live.output(job)
    agent = live.agent_pid("n1")
    assert SHELL.encode() in Path(f"/proc/{agent}/environ").read_bytes(), "it was there"
    if os.geteuid() == 0:  # as the job of a tenant that is kept apart would look
        look = subprocess.run(
            ["cat", f"/proc/{agent}/environ"], user=61_234, capture_output=True, check=False
        )
        assert (look.returncode, look.stdout) == (1, b"")
        assert b"Permission denied" in look.stderr


def test_down_leaves_nothing_in_memory_even_if_the_agent_was_killed() -> None:
    with live_cluster(nodes=1, gpus=0) as live:
        live.client.set_secret("file", VALUE.encode())
        live.wait(live.run("exec sleep 600", secrets=("file",)), "running")
        root = memory_folder(live.home.node("n1"))
        assert root is not None and [path for path in root.rglob("file") if path.is_file()]
        os.kill(live.controller_pid(), 19)  # it must not start the agent again
        live.kill_agent("n1")
        os.kill(live.controller_pid(), 9)
    assert not root.exists()


def client_of(live: Live, tenant: str, role: Role) -> Client:
    """Of a new user with this role."""
    user = f"{tenant}-{role.value}"
    live.client.add_user(user, {tenant: role})
    made = live.client.add_token(NewToken(user=user, tenant=tenant, role=role))
    return Client(live.client.url, made.secret, patience_s=60)


def test_each_tenant_has_its_own_and_another_cannot_reach_them(live: Live) -> None:
    need_root()
    tenants = [live.client.add_tenant(name) for name in ("ada", "bob")]
    ada, bob = (client_of(live, one.name, Role.MEMBER) for one in tenants)
    viewer = client_of(live, "ada", Role.VIEWER)
    with ada, bob, viewer:
        ada.set_secret("key", VALUE.encode())
        assert bob.secrets() == []
        for call in (viewer.secrets, lambda: viewer.set_secret("key", b"mine")):
            with pytest.raises(ShoalError, match="this needs more than the role viewer"):
                call()
        for refused in (
            lambda: bob.secrets(tenant="ada"),
            lambda: bob.set_secret("key", b"other", tenant="ada"),
            lambda: bob.remove_secret("key", tenant="ada"),
        ):
            with pytest.raises(ShoalError, match="your token is for the tenant bob"):
                refused()
        with pytest.raises(ShoalError, match="bob has no secret key"):
            bob.submit(live.spec("true", secrets=("key",)))
        (seen,) = live.client.secrets(tenant="ada")
        assert (seen.name, seen.by, seen.version) == ("key", "ada-member", 1)
        script = "id -u; stat -c '%u %a' $SHOAL_SECRETS/key; wc -c < $SHOAL_SECRETS/key; sleep 600"
        job = ada.submit(live.spec("sh", "-c", script, secrets=("key",))).id
        until(lambda: len(live.output(job).split()) == 4, more=lambda: live.client.why(job))
        uid = str(tenants[0].uid)
        assert live.output(job).split() == [uid, uid, "400", str(len(VALUE))]
        roots = [str(memory_folder(node)) for node in live.home.nodes.iterdir()]
        paths = " ".join(f"{root}/{job}.1.0/key {root}/.values/{job}.1.0" for root in roots)
        look = f"cat {paths} /dev/shm/*/*/key; ls {' '.join(roots)}; cat /proc/*/environ; true"
        thief = bob.submit(live.spec("sh", "-c", look)).id
        assert live.wait(thief) == "succeeded"
        said = live.output(thief)
        assert VALUE not in said and "key" not in said.replace("/key", "")
        live.client.cancel(job)
        live.wait(job)
    live.client.remove_tenant("ada")
    live.client.add_tenant("ada")
    assert live.client.secrets(tenant="ada") == []
