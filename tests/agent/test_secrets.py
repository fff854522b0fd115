"""Secrets on a node, with a real agent: in memory, for their member alone, and hidden in output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import stat
import tempfile
from pathlib import Path

import msgspec
import pytest

from shoal.agent import secrets as module
from shoal.agent.faults import CannotStart
from shoal.agent.shipping import Output
from shoal.link.sealing import Opener, seal
from shoal.link.wire import Handed
from shoal.machine.kernel import memory_folder
from shoal.model.commands import Acknowledge, Launch
from shoal.model.job import MemberRef
from shoal.model.secret import SecretsOf, SecretValue
from tests.agent.rig import Rig, rig
from tests.needs import need_root

ONE, TWO = MemberRef("j1", 1, 0), MemberRef("j1", 1, 1)
VALUE = "canary-3fa9c2"


def give(node: Rig, ref: MemberRef, *values: SecretValue, problem: str = "") -> tuple[str, ...]:
    node.secrets[ref] = SecretsOf(ref, values, problem=problem)
    return tuple(f"{one.name}={one.variable}" if one.variable else one.name for one in values)


def test_a_node_without_secrets_makes_nothing_in_memory() -> None:
    with rig() as node:
        node.launch(ONE, "true")
        assert node.exit(ONE).code == 0
        root = memory_folder(node.directory)
        assert root is not None
        assert not root.exists()


def in_memory(node: Rig) -> dict[str, bytes]:
    """All files that the node has in memory, by their path in its folder there."""
    root = memory_folder(node.directory)
    assert root is not None
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def on_disk(node: Rig, value: str = VALUE) -> list[str]:
    """Files of the node in which the value can be read. A member's output is its own, and is
    removed when it is shipped."""
    return [
        str(path)
        for path in node.directory.rglob("*")
        if path.is_file() and path.name != "output" and value.encode() in path.read_bytes()
    ]


def launch_of(ref: MemberRef, uid: int = 0) -> Launch:
    return Launch(
        node="n1",
        incarnation=1,
        ref=ref,
        argv=("true",),
        env={},
        workdir="",
        stop_grace_ms=0,
        secrets=("token",),
        uid=uid,
    )


def acknowledge(node: Rig, ref: MemberRef) -> None:
    assert node.report is not None
    node.order(Acknowledge(node="n1", incarnation=node.report.incarnation, ref=ref))
    node.wait(lambda: not (node.directory / "members" / str(ref)).exists())


def test_a_member_gets_a_file_and_a_variable_and_both_go_with_it() -> None:
    with rig() as node:
        wanted = give(
            node,
            ONE,
            SecretValue("file", f"{VALUE}\n".encode()),
            SecretValue("var", b"other-canary\n", "TOKEN"),
        )
        script = (
            'stat -c "%a %U" $SHOAL_SECRETS $SHOAL_SECRETS/file; ls $SHOAL_SECRETS;'
            'wc -c < $SHOAL_SECRETS/file; echo "length ${#TOKEN}"; exec sleep 600'
        )
        node.launch(ONE, "sh", "-c", script, secrets=wanted)
        node.says(ONE, "length 12\n")
        folder, file, listed, size, _ = node.text(ONE).splitlines()
        assert (folder.split()[0], file.split()[0], listed, size.strip()) == (
            "700",
            "400",
            "file",
            "14",
        )
        assert in_memory(node)[f"{ONE}/file"] == f"{VALUE}\n".encode()
        assert on_disk(node) == []
        names = (node.directory / "members" / str(ONE) / "secrets").read_text()
        assert names.split() == ["file", "var"]
        node.launch(TWO, "sh", "-c", "echo [$SHOAL_SECRETS$TOKEN]")
        node.says(TWO, "[]\n")
        assert node.wants == [ONE], "a member without secrets does not wait for the controller"
        node.stop(ONE)
        node.exit(ONE)
        assert f"{ONE}/file" not in in_memory(node)
        acknowledge(node, ONE)
        node.until(lambda: in_memory(node) == {})
    assert not memory_folder(node.directory).exists()  # type: ignore[union-attr]


def test_a_member_waits_for_its_secrets_and_holds_its_place() -> None:
    with rig() as node:
        node.launch(ONE, "true", secrets=("late",))
        node.until(lambda: len(node.wants) >= 2)  # it asks again
        report = node.ask()
        assert [one.what for one in report.getting] == ["is waiting for its secrets"]
        assert report.alive == ()
        give(node, ONE, SecretValue("late", b"here"))
        node.reconnect()
        assert node.exit(ONE).code == 0


def test_a_member_that_waits_for_its_secrets_can_be_stopped() -> None:
    with rig() as node:
        node.launch(ONE, "true", secrets=("never",))
        node.until(lambda: bool(node.wants))
        node.stop(ONE)
        assert "stopped before it started" in node.exit(ONE).why
        late = seal(SecretsOf(ONE, (SecretValue("never", VALUE.encode()),)), Opener().public)
        assert late is not None
        node.send(Handed(late))
        assert node.ask().alive == ()
        assert in_memory(node) == {}


def test_a_secret_that_is_gone_is_the_reason_why_a_member_cannot_start() -> None:
    with rig() as node:
        give(node, ONE, problem="default has no secret token; set it with: shoal secret set")
        node.launch(ONE, "true", secrets=("token",))
        exit_ = node.exit(ONE)
        assert exit_.code == 127
        assert exit_.why == (
            "cannot get its secrets: default has no secret token; set it with: shoal secret set"
        )
        give(node, TWO, SecretValue("binary", b"a\0b", "VAR"))
        node.launch(TWO, "true", secrets=("binary=VAR",))
        assert "binary contains a NUL byte" in node.exit(TWO).why


def test_what_a_member_prints_is_hidden_however_it_is_written() -> None:
    script = """
import os, sys, time, base64
value = open(os.environ["SHOAL_SECRETS"] + "/token").read()
def put(text): os.write(1, text.encode())
put("whole " + value + "\\n")
for part in (value[:5], value[5:], "\\n"):
    put(part); time.sleep(0.3)
put(base64.b64encode(value.encode()).decode() + "\\n")
put("x" * (256 * 1024 - 7) + value + "\\n")
put("partly " + value[:9])
"""
    with rig() as node:
        wanted = give(node, ONE, SecretValue("token", VALUE.encode()))
        node.launch(ONE, "python3", "-c", script, secrets=wanted)
        assert node.exit(ONE).code == 0
        size = (node.directory / "members" / str(ONE) / "output").stat().st_size
        node.until(lambda: len(node.output[ONE]) == size)
        text = node.text(ONE)
        stars = "*" * len(VALUE)
        assert text.startswith(f"whole {stars}\n{stars}\n****")
        assert text.endswith(f"{stars}\npartly {'*' * 9}")
        assert VALUE[:5] not in text


def test_a_secret_in_a_crash_and_in_the_stacks_is_hidden_in_the_reason() -> None:
    with rig() as node:
        wanted = give(node, ONE, SecretValue("token", VALUE.encode(), "TOKEN"))
        crash = 'import os; raise SystemExit("bad token " + os.environ["TOKEN"])'
        node.launch(ONE, "python3", "-c", crash, secrets=wanted)
        exit_ = node.exit(ONE)
        assert exit_.why == f"bad token {'*' * len(VALUE)}"
        assert on_disk(node) == []
        # As a bad program would: the value is an argument, and the name of a function.
        name = VALUE.replace("-", "_")
        give(node, TWO, SecretValue("token", name.encode()))
        hang = f"import time\ndef {name}(): time.sleep(600)\nprint('on', flush=True)\n{name}()"
        node.launch(TWO, "python3", "-c", hang, secrets=("token",))
        node.says(TWO, "on\n")
        node.stop(TWO, dump=True)
        exit_ = node.exit(TWO)
        assert name not in exit_.why + node.text(TWO)
        assert "its stacks:" in node.text(TWO)


def test_after_the_agent_was_killed_its_next_life_hides_what_is_left_and_removes_the_files() -> (
    None
):
    script = "echo begin; read x < go; cat $SHOAL_SECRETS/token; sleep 600"
    with rig() as node:
        os.mkfifo(node.directory / "go")
        wanted = give(node, ONE, SecretValue("token", VALUE.encode()))
        node.launch(ONE, "sh", "-c", script, secrets=wanted, workdir=str(node.directory))
        node.says(ONE, "begin\n")
        node.hang_up()  # so that this life ships no more of it
        (node.directory / "go").write_text("go\n")
        output = node.directory / "members" / str(ONE) / "output"
        node.wait(lambda: VALUE.encode() in output.read_bytes())
        node.restart(signal.SIGKILL)
        assert f"{ONE}/token" not in in_memory(node)
        node.until(lambda: not output.exists())
        assert node.text(ONE) == f"begin\n{'*' * len(VALUE)}"
        node.until(lambda: in_memory(node) == {})


def test_output_whose_secrets_are_no_longer_known_is_withheld() -> None:
    """As after a restart of the machine: memory is empty, the disk is not."""
    with rig() as node:
        wanted = give(node, ONE, SecretValue("token", VALUE.encode()))
        node.launch(ONE, "sh", "-c", "cat $SHOAL_SECRETS/token; exec sleep 600", secrets=wanted)
        node.says(ONE, "*" * len(VALUE))
        node.hang_up()
        output = node.directory / "members" / str(ONE) / "output"
        with output.open("ab") as file:
            file.write(f"\n{VALUE} again".encode())
        size = output.stat().st_size
        root = memory_folder(node.directory)
        assert root is not None
        (root / ".values" / str(ONE)).unlink()
        node.restart(signal.SIGKILL)
        node.until(lambda: not output.exists())
        assert VALUE not in node.text(ONE)
        assert len(node.output[ONE]) == size, "the bytes are counted, and not shown"
        assert "is withheld" in node.log()


def test_a_tenants_member_owns_its_files() -> None:
    need_root()
    with rig() as node:
        wanted = give(node, ONE, SecretValue("token", VALUE.encode()))
        node.launch(ONE, "sleep", "600", secrets=wanted, uid=61_234)
        node.until(lambda: bool(node.ask().alive))
        root = memory_folder(node.directory)
        assert root is not None
        folder, file = (root / str(ONE)).stat(), (root / str(ONE) / "token").stat()
        assert (folder.st_uid, stat.S_IMODE(folder.st_mode)) == (61_234, 0o700)
        assert (file.st_uid, stat.S_IMODE(file.st_mode)) == (61_234, 0o400)
        assert stat.S_IMODE(root.stat().st_mode) == 0o711
        assert stat.S_IMODE((root / ".values").stat().st_mode) == 0o700


def test_a_folder_that_another_user_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_root()
    squat = tmp_path / "squat"
    squat.mkdir()
    os.chown(squat, 12345, -1)
    monkeypatch.setattr(module, "memory_folder", lambda _: squat)
    made = module.Secrets(tmp_path, tmp_path, lambda *_: True, lambda *_: None)
    with pytest.raises(CannotStart, match="belongs to another user"):
        made._folder()
    monkeypatch.setattr(module, "memory_folder", lambda _: None)
    made = module.Secrets(tmp_path, tmp_path, lambda *_: True, lambda *_: None)
    with pytest.raises(CannotStart, match="no file system in memory"):
        made._folder()


def test_the_wait_for_a_controller_that_does_not_answer_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "memory_folder", lambda _: tmp_path / "memory")
    made = module.Secrets(tmp_path, tmp_path, lambda *_: True, lambda *_: None)

    async def wait() -> None:
        task = asyncio.create_task(made.get(launch_of(ONE)))
        await asyncio.sleep(0)
        for _ in range(module.ASKS_MAX):
            made.ask_again()
        await task

    with pytest.raises(CannotStart, match="has not sent them within 60 s"):
        asyncio.run(wait())


def test_output_of_a_member_without_secrets_is_shipped_as_it_was_read(tmp_path: Path) -> None:
    handle = os.open(tmp_path / "output", os.O_RDWR | os.O_CREAT)
    os.write(handle, b"line\n" * 1000)
    data = os.pread(handle, 5000, 0)
    assert Output(handle).hidden(0, data) is data
    os.close(handle)


def test_a_member_with_secrets_leaves_no_core_dump_and_others_as_always() -> None:
    limit = "sleep 0.5; ulimit -S -c; ulimit -H -c"
    with rig() as node:
        wanted = give(node, ONE, SecretValue("token", VALUE.encode()))
        node.launch(
            ONE,
            "bash",
            "-c",
            "until [ $(ulimit -H -c) != unlimited ]; do :; done; kill -SEGV $$",
            secrets=wanted,
            workdir=str(node.directory),
        )
        node.launch(TWO, "bash", "-c", limit)
        assert node.exit(ONE).code == 128 + signal.SIGSEGV
        assert not list(node.directory.glob("core*"))
        assert node.exit(TWO).code == 0
        ours = [resource.getrlimit(resource.RLIMIT_CORE)[i] for i in (0, 1)]
        seen = [-1 if word == "unlimited" else int(word) * 1024 for word in node.text(TWO).split()]
        assert seen == ours
        agent = int(msgspec.json.decode((node.directory / "agent.json").read_bytes())["pid"])
        assert resource.prlimit(agent, resource.RLIMIT_CORE)[0] == 1


def test_an_ordinary_users_agent_keeps_them_from_everybody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot give files away: its members are the same user."""
    need_root()
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    monkeypatch.setattr(module, "memory_folder", lambda _: place / "own")
    members = place / "members"
    (members / str(ONE)).mkdir(parents=True)
    for folder in (place, members, members / str(ONE)):
        os.chown(folder, 61_999, 61_999)
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.setgid(61_999)
            os.setuid(61_999)
            made = module.Secrets(members, members, lambda *_: True, lambda *_: None)
            made._keep(launch_of(ONE, uid=61_000), (SecretValue("token", VALUE.encode()),))
            code = 0
        os._exit(code)
    try:
        assert os.waitpid(pid, 0)[1] == 0
        modes = {
            str(path.relative_to(place)): (path.stat().st_uid, oct(path.stat().st_mode & 0o777))
            for path in (place / "own", *(place / "own").rglob("*"))
        }
        assert modes == {
            "own": (61_999, "0o700"),
            "own/.values": (61_999, "0o700"),
            f"own/.values/{ONE}": (61_999, "0o600"),
            f"own/{ONE}": (61_999, "0o700"),
            f"own/{ONE}/token": (61_999, "0o400"),
        }
    finally:
        shutil.rmtree(place)
