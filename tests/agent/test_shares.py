"""Shares of a GPU: the limits that a member gets, and what happens to one that uses more."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import pytest

from shoal.agent.shares import (
    CONTEXT_MB,
    LOOKS,
    MpsDaemons,
    Share,
    Shares,
    allocator_env,
    client_env,
    daemon_env,
    knows_fraction,
    packages_of,
    share_of,
)
from shoal.model.commands import Launch, Limits
from shoal.model.job import MemberRef
from shoal.model.policy import GpuOver

GPU_MB = 80_000
REF = MemberRef("j1", 1, 0)

# Behaves as NVIDIA's daemon does: it stays in the foreground and makes a socket in its folder.
DAEMON = """#!/bin/sh
[ "$1" = -f ] || exit 9
echo "$CUDA_VISIBLE_DEVICES" > "$CUDA_MPS_PIPE_DIRECTORY/gpu"
id -u > "$CUDA_MPS_PIPE_DIRECTORY/user"
env > "$CUDA_MPS_PIPE_DIRECTORY/environment"
touch "$CUDA_MPS_PIPE_DIRECTORY/control"
exec sleep 600
"""


def launch(gpus: tuple[int, ...] = (3,), milli: int = 250, **more: object) -> Launch:
    fields: dict[str, object] = {
        "node": "n1",
        "incarnation": 1,
        "ref": REF,
        "argv": ("true",),
        "env": {},
        "workdir": "",
        "stop_grace_ms": 0,
        "gpus": gpus,
        "gpu_milli": milli,
        **more,
    }
    return Launch(**fields)  # type: ignore[arg-type]


def program(folder: Path, text: str) -> str:
    path = folder / "daemon"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def shares(daemons: MpsDaemons, folder: Path) -> Shares:
    driver = folder / "driver"
    driver.touch()
    return Shares(daemons, GPU_MB, driver)


@pytest.mark.parametrize(
    ("gpus", "milli", "asked_mb", "found"),
    [
        ((3,), 250, 0, Share(3, 20_000, 25)),
        ((3,), 300, 24_000, Share(3, 24_000, 30)),
        ((0,), 1, 0, Share(0, 80, 1)),
        ((3,), 1000, 0, None),
        ((0, 1), 1000, 0, None),
        ((), 1000, 0, None),
    ],
)
def test_a_share_is_a_part_of_one_gpu(
    gpus: tuple[int, ...], milli: int, asked_mb: int, found: Share | None
) -> None:
    assert share_of(launch(gpus, milli, gpu_memory_mb=asked_mb), GPU_MB) == found


def test_the_number_of_a_shared_gpu_is_that_among_the_daemon_s_gpus() -> None:
    """With any other number, CUDA finds no GPU."""
    assert daemon_env(3, "/run/x")["CUDA_VISIBLE_DEVICES"] == "3"
    env = client_env(Share(3, 20_000, 25), "/run/x")
    assert env == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/x",
        "CUDA_VISIBLE_DEVICES": "0",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=20000M",
    }


def test_torch_s_limit_is_added_to_the_options_of_the_job() -> None:
    share, name = Share(3, 20_000, 25), "PYTORCH_CUDA_ALLOC_CONF"
    limit = "per_process_memory_fraction:0.2500"
    assert allocator_env(share, GPU_MB, {}) == {name: limit}
    own = {name: "expandable_segments:True"}
    assert allocator_env(share, GPU_MB, own) == {name: f"expandable_segments:True,{limit}"}
    newer = {"PYTORCH_ALLOC_CONF": "x:1"}
    assert allocator_env(share, GPU_MB, newer) == {"PYTORCH_ALLOC_CONF": f"x:1,{limit}"}
    assert allocator_env(share, GPU_MB, {name: "per_process_memory_fraction:0.1"}) == {}


@pytest.mark.parametrize(
    ("version", "knows"),
    [("2.9.1", False), ("2.10.0", True), ("2.11.0+cu130", True), ("3.0", True)],
)
def test_an_older_torch_is_not_given_an_option_that_it_would_fail_at(
    version: str, knows: bool
) -> None:
    assert knows_fraction(f"__version__ = '{version}'\ndebug = False\n") is knows
    assert not knows_fraction("")


@pytest.mark.parametrize("how", ["own", "pth", "base"])
def test_torch_is_found_where_the_interpreter_finds_it(how: str, tmp_path: Path) -> None:
    """An environment over another that has torch took 40 GB with a tenth of a GPU."""
    env, base = tmp_path / "env", tmp_path / "base"
    sites = [root / "lib" / "python3.12" / "site-packages" for root in (env, base)]
    for site in sites:
        site.mkdir(parents=True)
    (sites[how != "own"] / "torch").mkdir()
    if how == "pth":
        (sites[0] / "other.pth").write_text(f"import this\n{sites[1]}\n")
    shares = str(how == "base").lower()
    (env / "pyvenv.cfg").write_text(f"home = {base}/bin\ninclude-system-site-packages = {shares}\n")
    places = list(packages_of(str(env)))
    assert places[0] == str(sites[0])
    assert (str(sites[1]) in places) is (how != "own")


async def _ready(found: Shares, command: Launch) -> Launch:
    assert found.here(command) is None, "its daemon has not started"
    return await found.get(command)


@pytest.mark.parametrize("uid", [0, 61_000])
def test_members_of_one_user_share_a_daemon_and_others_have_their_own(
    uid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AN_OPERATORS_KEY", "canary")  # the daemon's user can read its environment
    if uid and os.geteuid():
        pytest.skip("only root can start a daemon as another user")
    with tempfile.TemporaryDirectory() as public:  # tmp_path is closed to others
        os.chmod(public, 0o755)
        _share_and_close(uid, tmp_path, program(Path(public), DAEMON))


def _share_and_close(uid: int, tmp_path: Path, path: str) -> None:
    daemons = MpsDaemons(tmp_path, path)

    async def run() -> None:
        found = shares(daemons, tmp_path)
        command = launch(uid=uid)
        started = await _ready(found, command)
        folder = Path(started.env["CUDA_MPS_PIPE_DIRECTORY"])
        assert (folder / "gpu").read_text() == "3\n"
        assert (folder / "user").read_text() == f"{uid or os.geteuid()}\n"
        assert "canary" not in (folder / "environment").read_text()
        made = os.stat(folder)
        assert (made.st_uid, made.st_mode & 0o777) == (uid or os.geteuid(), 0o700)
        again = found.here(command)
        assert again is not None
        assert again.env == started.env
        assert len(daemons.pids()) == 1
        other = await _ready(found, launch(gpus=(1,), uid=uid))
        assert other.env["CUDA_MPS_PIPE_DIRECTORY"] != str(folder)
        assert len(daemons.pids()) == 2

    try:
        asyncio.run(run())
    finally:
        pids = daemons.pids()
        daemons.close()
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
    assert codes == [signal.SIGKILL] * 2
    assert not daemons.pids()


def test_without_mps_a_member_starts_with_what_else_there_is(tmp_path: Path) -> None:
    daemons = MpsDaemons(tmp_path, program(tmp_path, "#!/bin/sh\nexit 1\n"))

    async def run() -> Launch:
        found = shares(daemons, tmp_path)
        waiting = asyncio.create_task(found.get(launch(argv=("no-such-program",))))
        await asyncio.sleep(0)
        pid = next(iter(daemons.pids()))
        await asyncio.to_thread(os.waitpid, pid, 0)
        assert daemons.ended(pid, 1)
        return await waiting

    started = asyncio.run(run())
    assert "CUDA_MPS_PIPE_DIRECTORY" not in started.env
    assert daemons.failed
    daemons.close()
    assert MpsDaemons(tmp_path, "").failed == "nvidia-cuda-mps-control is not installed"


class Rule:
    def __init__(self) -> None:
        self.found: list[tuple[MemberRef, str, bool]] = []

    def __call__(self, ref: MemberRef, why: str, *, end: bool) -> None:
        self.found.append((ref, why, end))


@pytest.mark.parametrize("rule", list(GpuOver))
def test_a_member_over_its_share_is_ended_or_warned_once(rule: GpuOver, tmp_path: Path) -> None:
    found, told = shares(MpsDaemons(tmp_path, ""), tmp_path), Rule()
    found.expect(launch(limits=Limits(gpu_over=rule)))
    assert found.gpus == {3}
    allowed_mb = 20_000 + CONTEXT_MB

    def owner(pid: int) -> MemberRef | None:
        return REF if pid < 100 else None

    for _ in range(LOOKS):  # two processes together, within the share
        found.keep({3: {10: 12_000, 11: allowed_mb - 12_000, 500: 70_000}}, owner, told)
    for _ in range(LOOKS - 1):
        found.keep({3: {10: allowed_mb + 1}}, owner, told)
    found.keep({3: {10: 1}}, owner, told)  # freed a moment later
    for _ in range(LOOKS - 1):
        found.keep({3: {10: allowed_mb + 1}, 2: {10: 5}}, owner, told)
    assert not told.found
    for _ in range(3):
        found.keep({3: {10: allowed_mb + 1}}, owner, told)
    why = f"it used {allowed_mb + 1} MB of GPU 3, but asked for 20000 MB of it (GPU share)"
    assert told.found == [(REF, why, rule is GpuOver.END)]
    found.forget(REF)
    assert not found.gpus


def test_gpus_without_a_driver_have_nothing_to_enforce(tmp_path: Path) -> None:
    found = Shares(MpsDaemons(tmp_path, program(tmp_path, DAEMON)), GPU_MB, tmp_path / "none")
    command = launch()
    assert found.here(command) is command
    found.expect(command)
    assert not found.gpus
