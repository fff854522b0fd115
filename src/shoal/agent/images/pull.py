"""Images of a node: each is pulled once, whoever waits for it, and a failure says what to do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.agent.faults import CannotStart
from shoal.agent.images.runtimes import Runs, Runtime, find
from shoal.machine.kernel import memory_folder
from shoal.model.commands import Launch, Prepare
from shoal.model.job import Fault
from shoal.model.secret import registry_secret

log = logging.getLogger("shoal.agent")

TRIES_MAX = 3  # only where the network is at fault; podman has tried as often by itself
AGAIN_S = 2.0
PULL_S_MAX = 3600.0
LOOK_S_MAX = 60.0
KEPT_MAX = 16  # image files of apptainer; podman and docker have stores of their own
LOCAL = "localhost/"  # made on the node: no registry has it
SIF = ".sif"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# "Copying blob 0a1b2c3d4e5f [====>---] 12.3MiB / 50.0MiB", or "0a1b...: Downloading 12.3MB/50MB"
PART = re.compile(
    r"([0-9a-f]{12})\b[^\n]*?([0-9.]+) ?([KMGT]?)i?B ?/ ?([0-9.]+) ?([KMGT]?)i?B", re.IGNORECASE
)
DONE = re.compile(r"([0-9a-f]{12})\b:? (?:done|Pull complete|Already exists)", re.IGNORECASE)


class Progress:
    """How much of an image is here, as far as its parts are known."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[float, float]] = {}

    def take(self, text: str) -> None:
        for part, done, unit, whole, whole_unit in PART.findall(text):
            size = float(whole) * UNITS[whole_unit.upper()]
            self._parts[part] = float(done) * UNITS[unit.upper()], size
        for part in DONE.findall(text):
            if part in self._parts:
                self._parts[part] = (self._parts[part][1],) * 2

    def __str__(self) -> str:
        whole = sum(size for _, size in self._parts.values())
        done = sum(done for done, _ in self._parts.values())
        return f": {100 * done / whole:.0f} %" if whole else ""


class Images:
    def __init__(self, directory: Path, runs: Runs, in_use: Callable[[], Set[str]]) -> None:
        self._directory = directory
        self._files = directory / "images"
        self._runs = runs
        self._in_use = in_use
        self._here: set[tuple[str, str]] = set()  # images, and for whom they were found
        self._pulls: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._progress: dict[tuple[str, str], Progress] = {}
        self._waiting: dict[tuple[str, str], int] = {}

    def here(self, order: Launch | Prepare) -> bool:
        return _key(order) in self._here

    def forget(self, image: str) -> None:
        """It is gone: somebody has tidied up the node."""
        self._here = {key for key in self._here if key[0] != image}

    def progress(self, order: Launch | Prepare) -> str:
        """In words that follow the name of the node."""
        return f"is pulling {order.image}{self._progress.get(_key(order), '')}"

    def name(self, image: str) -> str:
        """What the runtime knows it by."""
        runtime = find()
        if runtime is None or runtime.name != "apptainer" or image.startswith("/"):
            return untagged(image)
        return str(self._file(image))

    async def get(self, order: Launch | Prepare, login: str) -> None:
        """Returns when it is here; raises CannotStart. Members that need the same image wait for
        the same pull, which ends when nobody waits for it any more. `login`: USER:PASSWORD."""
        key = _key(order)
        if key in self._here:
            return
        pull = self._pulls.get(key)
        if pull is None:
            pull = self._pulls[key] = asyncio.create_task(self._pull(key, login))
            pull.add_done_callback(lambda done: self._over(key, done))
        self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            await asyncio.shield(pull)
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                pull.cancel()
                self._over(key, pull)  # whoever comes now starts another

    def _over(self, key: tuple[str, str], pull: asyncio.Task[None]) -> None:
        if self._pulls.get(key) is pull:
            del self._pulls[key]
            self._progress.pop(key, None)

    async def _pull(self, key: tuple[str, str], login: str) -> None:
        image, tenant = key
        runtime = find()
        if runtime is None:
            raise CannotStart("nothing on this node can run images", Fault.MISSING)
        if image.startswith("/"):
            self._must_be_file(runtime, image, tenant)
        elif await self._exists(runtime, image) and (not tenant or image.startswith(LOCAL)):
            pass
        elif image.startswith(LOCAL):
            raise CannotStart(f"there is no image {image} on this node", Fault.MISSING)
        else:
            await self._fetch(runtime, key, login)
        self._here.add(key)

    def _must_be_file(self, runtime: Runtime, image: str, tenant: str) -> None:
        if tenant:
            raise CannotStart("image: a tenant that is kept apart names an image of a registry")
        if runtime.name != "apptainer":
            raise CannotStart(f"only apptainer runs files like {image}; this node has another")
        if not Path(image).is_file():
            raise CannotStart(f"{image} does not exist on this node", Fault.MISSING)

    async def _exists(self, runtime: Runtime, image: str) -> bool:
        if runtime.name == "apptainer":
            return self._file(image).exists()
        ask = ("image", "exists") if runtime.name == "podman" else ("image", "inspect")
        code, text = await self._runs.run(
            (*runtime.command, *ask, untagged(image)), seconds=LOOK_S_MAX
        )
        if code and (problem := problem_in(text)) is NO_DAEMON:
            raise CannotStart(f"{problem.why} ({last_line(text)})", problem.fault)
        return code == 0

    async def _fetch(self, runtime: Runtime, key: tuple[str, str], login: str) -> None:
        """A tenant that is kept apart asks the registry even for an image that is here: another
        tenant may have pulled it with a password."""
        image, _ = key
        progress = self._progress[key] = Progress()
        log.info("pulling %s", image)
        for number in range(1 if runtime.name == "podman" else TRIES_MAX):
            if number:
                await asyncio.sleep(AGAIN_S * number)
            words = [*runtime.command, *self._words(runtime, image)]
            with credentials(self._directory, registry(image), login) as env:
                code, text = await self._runs.run(
                    words, seconds=PULL_S_MAX, env=env, said=progress.take
                )
            if code == 0:
                return
            problem = problem_in(text)
            if not problem.again:
                break
        log.warning("cannot pull %s: %s", image, text)
        why = problem.why.format(secret=registry_secret(image))
        raise CannotStart(f"cannot pull {image}: {why} ({last_line(text)})", problem.fault)

    def _words(self, runtime: Runtime, image: str) -> list[str]:
        match runtime.name:
            case "podman":  # the scheme keeps it from taking the name for something else
                return ["pull", f"docker://{untagged(image)}"]
            case "docker":
                return ["pull", untagged(image)]
        self._files.mkdir(mode=0o700, exist_ok=True)
        self._trim()
        return ["pull", "--force", str(self._file(image)), f"docker://{untagged(image)}"]

    def _file(self, image: str) -> Path:
        return self._files / f"{hashlib.sha256(image.encode()).hexdigest()[:32]}{SIF}"

    def _trim(self) -> None:
        """The oldest files go first; those in use stay."""
        used = {self._file(image) for image in self._in_use() | {key[0] for key in self._pulls}}
        found = sorted((file.stat().st_mtime_ns, file) for file in self._files.glob(f"*{SIF}"))
        for _, file in found[: max(0, len(found) - KEPT_MAX + 1)]:
            if file not in used:
                file.unlink(missing_ok=True)
                self._here = {key for key in self._here if self._file(key[0]) != file}


def untagged(image: str) -> str:
    """With a digest, the tag says nothing, and podman takes only one of them."""
    return re.sub(r":[^:/@]+@", "@", image)


def registry(image: str) -> str:
    """The host of an image's registry, as docker finds it."""
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first) else "docker.io"


def _key(order: Launch | Prepare) -> tuple[str, str]:
    return order.image, order.tenant if order.uid else ""


# Credentials for a registry: in memory, for as long as a pull takes, on no command line.


HUB = "docker.io"
HUB_KEY = "https://index.docker.io/v1/"  # what docker calls it in its own file


@contextmanager
def credentials(directory: Path, host: str, login: str) -> Iterator[Mapping[str, str]]:
    """Variables that make podman, docker and apptainer use `login` (USER:PASSWORD) for the host."""
    if not login:
        yield {}
        return
    user, colon, password = login.partition(":")
    if not colon:
        raise CannotStart(f"the secret registry-{host} is not USER:PASSWORD")
    parent = memory_folder(directory)
    if parent is None:
        raise CannotStart("this node has no folder in memory for the credentials of a registry")
    folder = tempfile.mkdtemp(prefix="registry-", dir=parent)  # the next life empties the parent
    try:
        auth = {"auth": base64.b64encode(login.encode()).decode()}
        names = [host, HUB_KEY] if host == HUB else [host]
        file = Path(folder) / "config.json"
        file.touch(mode=0o600)
        file.write_bytes(msgspec.json.encode({"auths": dict.fromkeys(names, auth)}))
        yield {
            "REGISTRY_AUTH_FILE": str(file),
            "DOCKER_CONFIG": folder,
            "APPTAINER_DOCKER_USERNAME": user,
            "APPTAINER_DOCKER_PASSWORD": password,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# What a runtime prints when something is wrong, and what that means for the job and the node.


LINE_LETTERS_MAX = 500


class Problem(NamedTuple):
    """What a runtime prints (in lower case) when something is wrong, and what that means."""

    signs: tuple[str, ...]
    why: str
    fault: Fault = Fault.NONE
    again: bool = False


# The first that matches counts.
NO_DAEMON = Problem(
    ("cannot connect to the docker daemon", "is the docker daemon running"),
    "docker's daemon does not answer on this node",
    Fault.MISSING,
)
PROBLEMS = (
    NO_DAEMON,
    Problem(("no space left", "disk quota"), "the disk of this node is full", Fault.START),
    Problem(
        ("newuidmap", "newgidmap", "subuid", "subgid", "insufficient uids or gids"),
        "podman cannot map users on this node: install newuidmap (the package uidmap), and give "
        "the agent's user a range in /etc/subuid and /etc/subgid",
        Fault.MISSING,
    ),
    Problem(
        (
            "unauthorized",
            "authentication required",
            "denied",
            "forbidden",
            "invalid username",
            "no basic auth credentials",
        ),
        "its registry does not allow it: is the name right, and is there a secret {secret}?",
    ),
    Problem(
        ("manifest unknown", "not found", "name unknown", "not known", "repository does not exist"),
        "there is no such image",
    ),
    Problem(
        (
            *("dial tcp", "timeout", "connection re", "no such host", "tls handshake", "eof"),
            *("i/o error", "network is unreachable", "too many requests", "longer than"),
            *("server misbehaving", "502", "503", "504"),
        ),
        "its registry cannot be reached from this node",
        Fault.MISSING,
        again=True,
    ),
)
OTHERWISE = Problem((), "it could not be pulled", Fault.MISSING)


def problem_in(text: str) -> Problem:
    lowered = last_line(text).lower()
    for problem in PROBLEMS:
        if any(sign in lowered for sign in problem.signs):
            return problem
    return OTHERWISE


def last_line(text: str) -> str:
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
    said = lines[-1][:LINE_LETTERS_MAX] if lines else "it printed nothing"
    return "".join(letter for letter in said if letter.isprintable())


def not_started(said: str, program: str) -> tuple[str, Fault]:
    """Why a container did not run its command. Another node has the same image, but perhaps a
    runtime that works."""
    lowered = said.lower()
    if "uidmap" in lowered or "gidmap" in lowered:
        return problem_in(said).why, problem_in(said).fault
    if "exec:" in lowered and ("not found" in lowered or "no such file" in lowered):
        return f"no program {program!r} in the image", Fault.NONE
    if "exec:" in lowered and "permission denied" in lowered:
        return f"{program} cannot be executed in the image", Fault.NONE
    return f"its container could not start: {said}", problem_in(said).fault or Fault.MISSING
