"""Every verb from a machine that shares no disk with the head: an address and a token are all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shoal.cli.first_page import VERBS
from shoal.client import contexts
from tests.cli.conftest import Result
from tests.live.cluster import Live, live_cluster

SECONDS = 120


class Try(NamedTuple):
    """A verb's arguments, and what its output must contain. `code` 2 is a refusal in one line."""

    args: tuple[str, ...]
    shows: str = ""
    code: int = 0
    stdin: str = ""


ON_HEAD = "is for the cluster of this machine"
# {job} is one that has finished, {live} one that runs, {service} one that serves.
TRIES: dict[str, list[Try]] = {
    "run": [
        Try(("--wait", "--", "cat", "data.txt"), "from the laptop"),
        Try(("job.yaml", "--wait"), "from a job file"),
        Try(("--wait", "--", "sh", "-c", "echo $PATH"), "bin"),
    ],
    "map": [
        Try(("double.py:double", "lines.jsonl", "-o", "here.jsonl", "-n", "1"), "3 lines"),
        Try(("double.py:double", "lines.jsonl", "-o", "out.jsonl", "--cluster", "-n1"), "3 lines"),
    ],
    "ps": [Try(("-a",), "{job}")],
    "sweep": [Try(("{job}",), "is not a sweep", 1)],
    "logs": [Try(("{job}",), "from the laptop"), Try(("-f", "{job}"), "from the laptop")],
    "why": [Try(("{job}",), "{job}")],
    "explain": [Try(("{job}",), "{job}")],
    "exec": [Try(("{job}", "--", "true"), "{job} has ended", 1)],
    "ssh-config": [Try((), "Host shoal-*")],
    "ssh-proxy": [Try(("--help",), "ssh")],  # makes keys; test_sessions.py uses it
    "dev": [  # tests/web/test_notebook.py uses one
        Try(("list",), "no dev environment"),
        Try(("open",), "there is no dev environment", 1),
        Try(("--editor", "emacs"), "use jupyter or code", 2),
    ],
    "attach": [Try(("{job}",), "{job} has ended", 1)],
    "forward": [Try(("{job}", "8888"), "{job} has ended", 1)],  # test_sessions.py forwards
    "ls": [Try(("{job}",), "has kept no files"), Try(("{job}", "--json"), '"files": []')],
    "cp": [
        Try(("{job}:no.txt", "."), "has kept no file", 1),
        Try(("data.txt", "{job}:"), "has ended", 1),  # tests/live/test_outputs.py copies
    ],
    "sleep": [Try(("{job}",), "{job} cannot be put to sleep: it has ended", 1)],
    "wake": [Try(("{job}",), "{job} cannot be woken: it has ended", 1)],
    "cancel": [Try(("{live}",), "{live}")],
    "requeue": [Try(("{job}",))],
    "retry": [Try(("{job}",), "is not an array", 1)],
    "notify": [
        Try(("add", "failed=mail:me@example.com"), "rule r1"),
        Try((), "mail:me@example.com"),
        Try(("test", "r1"), "no mail server is set", 1),
        Try(("key",), "whsec_"),
        Try(("add", "never=x"), "cannot be read", 2),
    ],
    "workflow": [Try(("j999",), "there is no workflow", 1)],
    "schedule": [
        Try(("add", "nightly", "--cron", "0 3 * * *", "--", "true"), "nightly is set"),
        Try(("list",), "0 3 * * *"),
        Try(("remove", "nightly"), "nightly is removed"),
    ],
    "secret": [Try(("set", "KEY"), stdin="value\n"), Try(("list",), "KEY")],
    "serve": [
        Try(("site", "--no-wait", "--", "sh", "-c", "exec python -m http.server $PORT"), "site"),
        Try(
            ("tls", "--port", "9443", "--certificate", "mine.pem", "--", "true"),
            "certificate: ",
            1,
        ),
    ],
    "services": [Try((), "site")],
    "service": [Try(("site", "--stop"), "site")],
    "up": [Try((), ON_HEAD, 2)],
    "down": [Try((), ON_HEAD, 2)],
    "join": [Try(("head:6379",), ON_HEAD, 2)],
    "leave": [Try((), ON_HEAD, 2)],
    "install-service": [Try((), ON_HEAD, 2)],
    "slurm-commands": [Try(("bin",), "sbatch")],
    "ends": [Try(("--in", "2m"), ON_HEAD, 2)],
    "heads": [
        Try((), "one head and no database"),
        Try(("invite",), "not a head of a cluster with a database", 1),
        Try(("forget", "other"), "there is no head 'other'", 1),
    ],
    "upgrade": [Try((), ON_HEAD, 2), Try(("--check",), ON_HEAD, 2)],
    "salvage": [Try((), ON_HEAD, 2)],
    "backup": [Try((), ON_HEAD, 2)],
    "restore": [Try(("b.tar",), ON_HEAD, 2)],
    "status": [Try((), "2 ready"), Try(("--json",), '"nodes"')],
    "page": [Try((), "/#code=")],
    "top": [Try(("--json",), '"ready": 2')],
    "nodes": [Try((), "n1"), Try(("n1", "--tree"), "n1 shows no tree")],
    "cordon": [Try(("n1",), "n1")],
    "drain": [Try(("n1",), "n1")],
    "uncordon": [Try(("n1",), "n1")],
    "note": [Try(("{job}", "good run"), "{job}"), Try(("{job}",), "good run")],
    "label": [
        Try(("n1", "pool=a"), "n1"),
        Try(("{job}", "run=a"), "{job}"),
        Try(("n1", "=a"), "key=value", 2),
    ],
    "taint": [Try(("n1", "old"), "n1"), Try(("n1", "old-"), "n1")],
    "check": [
        Try(("n1", "--json"), "n1"),
        Try(("--network", "n1"), "two or more", 1),
        Try(("--storage", "/missing-folder", "n1"), "there is no folder", 1),
    ],
    "supply": [Try((), ""), Try(("--json",), '"supplies": []')],
    "policy": [
        Try(("show",), "order"),
        Try(("check", "own.yaml"), "ours:order will be looked up on the head"),
        Try(("set", "mine.yaml"), "mine"),
        Try(("set", "own.yaml"), "order", 1),
    ],
    "events": [Try(("--job", "{job}"), "{job}")],
    "report": [Try(("--csv", "report.csv"), "")],
    "prices": [Try((), ""), Try(("set", "prices.yaml"), "")],
    "tenant": [Try(("add", "lab"), "lab"), Try(("list",), "lab")],
    "user": [Try(("add", "ann", "--tenant", "lab"), "ann"), Try(("list",), "ann")],
    "token": [Try(("add", "ann"), "shoal_"), Try(("list",), "ann")],
    "key": [
        Try(("add", "--for", "bob", "--tokens", "1M/day", "--rpm", "60"), "shoalkey_"),
        Try(("list",), "1,000,000/day"),
    ],
    "audit": [Try((), "tenant")],
    "whoami": [Try((), "operator")],
    "login": [Try(("--help",), "log in")],  # test_login.py logs in
    "neighbor": [
        Try(("invite", "east", "--gpus-max", "2"), "shoal neighbor add http"),
        Try(("list",), "there are no neighbors"),
        Try(("remove", "west", "--gone"), "there is no neighbor", 1),
        Try(("revoke", "east"), "revoked 1 token of east"),
    ],
    "logout": [Try(("--help",), "token")],
    "clusters": [Try((), "here")],
    "context": [Try(("list",), "far")],
    "oidc": [Try((), "has no sign-in by OpenID Connect", 1)],
    "completion": [Try(("bash",), "complete")],
    "plan": [
        Try(("--model", "llama3-8b", "--tokens", "1T", "--nodes", "4"), "time to train"),
        Try(("--history", "--goal", "p90 wait < 1h"), "p90 wait < 1h"),
        Try(("--history",), "--goal is missing", 2),
    ],
    "sim": [Try(("--history",), "fair"), Try(("--history", "--json"), '"policies"')],
    "import": [Try(("sacct", "nowhere.txt"), "nowhere.txt", 1)],  # of another system's files
    "help": [Try(("jobs",), "shoal run")],
    "demo": [Try(("--help",), "cluster")],  # brings up a cluster of its own
}
# Those that need what others made come after them.
ORDER = ["run", "tenant", "user", "token", *VERBS]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=2, gpus=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def laptop(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a project; beside it a home with nothing but a context."""
    root = tmp_path_factory.mktemp("laptop")
    project, home = root / "project", root / "home"
    project.mkdir()
    home.mkdir()
    for name, text in {
        "data.txt": "from the laptop\n",
        "job.yaml": "command: cat beside/file.txt\nname: filed\n",
        "beside/file.txt": "from a job file\n",
        "double.py": "def double(x): return 2 * x\n",
        "lines.jsonl": "1\n2\n3\n",
        "mine.yaml": "base: fair\nname: mine\n",
        "own.yaml": "base: fair\nname: own\norder: ours:order\n",
        "prices.yaml": "currency: EUR\ngpus: {H100: {per_hour: 2}}\n",
        "mine.pem": "",
    }.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
        with contexts.changing() as known:
            token = live.home.token.read_text().strip()
            known.contexts["far"] = contexts.Context(url=live.client.url, token=token)
    assert shoal(root, "run", "--wait", "--", "cat", "data.txt").code == 0  # it is j1
    return root


def shoal(laptop: Path, *args: str, stdin: str = "", start: tuple[str, ...] = ()) -> Result:
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(laptop / "home"),
        "SHOAL_CONTEXT": "far",
        "XDG_CONFIG_HOME": str(laptop / "home" / ".config"),
    }
    done = subprocess.run(
        [sys.executable, *(start or ("-m", "shoal.main")), *args],
        cwd=laptop / "project",
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def test_every_verb_has_an_entry() -> None:
    """Whoever adds a verb says here how it is used from another machine."""
    assert set(TRIES) == set(VERBS)


def attempt(laptop: Path, live: Live, verb: str, start: tuple[str, ...] = ()) -> None:
    for one in TRIES[verb]:
        if any("{live}" in word for word in one.args):
            names = {"live": live.run("sleep 600")}
        else:
            names = {"job": "j1"}
        args = [word.format(**names) if "{" in word else word for word in one.args]
        result = shoal(laptop, verb, *args, stdin=one.stdin, start=start)
        said = f"shoal {verb} {' '.join(args)}\n{result.out}\n{result.err}"
        assert result.code == one.code, said
        shows = one.shows.format(**names) if one.shows.startswith("{") else one.shows
        assert shows in result.out + result.err, said
        assert "Traceback" not in result.err and "should not happen" not in result.err, said


@pytest.mark.parametrize("verb", list(dict.fromkeys(ORDER)))
def test_each_verb_works_by_address_and_token_alone(laptop: Path, live: Live, verb: str) -> None:
    attempt(laptop, live, verb)
    home = laptop / "home"
    assert sorted(path.name for path in home.iterdir()) == [".config"], "it made a home here"


# Those that read files, make files, start processes or bring parts of the house with them.
ON_MACOS = [
    *("run", "map", "logs", "serve", "services", "service"),
    *("top", "report", "completion", "plan", "sim"),
]
MORE_ON_MACOS = [
    *("ps", "why", "explain", "cancel", "requeue", "retry", "secret"),
    *("status", "page", "nodes", "cordon", "uncordon", "label", "taint", "policy", "events"),
    *("prices", "supply", "whoami", "context"),
]


@pytest.mark.parametrize(
    "verb", [*ON_MACOS, *(pytest.param(verb, marks=pytest.mark.soak) for verb in MORE_ON_MACOS)]
)
def test_a_machine_with_macos_can_use_it(laptop: Path, live: Live, verb: str) -> None:
    """Without what only Linux has, and without the libraries that only a head needs."""
    if verb == "map":  # an output that is there is not written again
        for name in ("out.jsonl", "here.jsonl"):
            (laptop / "project" / name).unlink(missing_ok=True)
    attempt(laptop, live, verb, start=(str(Path(__file__).with_name("as_macos.py")),))


@pytest.mark.parametrize("verb", ["up", "down", "leave", "salvage", "demo"])
def test_macos_cannot_be_a_part_of_a_cluster_and_is_told_so(laptop: Path, verb: str) -> None:
    result = shoal(laptop, verb, start=(str(Path(__file__).with_name("as_macos.py")),))
    assert result.code != 0
    assert f"shoal {verb} needs Linux" in result.err
    assert len(result.err.splitlines()) == 1


def test_what_was_made_here_is_written_here(laptop: Path, live: Live) -> None:
    found = (laptop / "project" / "out.jsonl").read_text().split()
    assert found == ["2", "4", "6"]
    assert (laptop / "project" / "report.csv").read_text()


def _figures(answer: dict[str, Any]) -> list[Any]:
    """Without how long its steps took."""
    return [
        {k: v for k, v in one.items() if not k.startswith("step_")} for one in answer["policies"]
    ]


def test_the_history_of_the_head_is_that_of_its_home(laptop: Path, live: Live) -> None:
    far = json.loads(shoal(laptop, "sim", "--history", "--json").out)
    env = {**os.environ, "SHOAL_HOME": str(live.home.path)}
    words = [sys.executable, "-m", "shoal.main", "sim", "--history", "--json"]
    near = json.loads(subprocess.run(words, env=env, capture_output=True, check=True).stdout)
    for one, other in zip(_figures(far), _figures(near), strict=True):
        assert {k: (v, other[k]) for k, v in one.items() if v != other[k]} == {}
    assert far["nodes"] == near["nodes"] == 2
