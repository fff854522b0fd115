"""Members in containers, on a real agent with a real podman."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from shoal.model.job import MemberRef
from tests.agent.rig import Rig, rig
from tests.podman import IMAGE, Podman, podman


@pytest.fixture(scope="module")
def store() -> Iterator[Podman]:
    with podman() as made:
        yield made


@pytest.fixture(scope="module")
def shared(store: Podman) -> Iterator[Rig]:
    """One node for all tests that leave it as it was."""
    with rig(**store.env) as made:
        yield made


numbers = iter(range(1, 1000))


def fresh() -> MemberRef:
    return MemberRef(f"j{next(numbers)}", 1, 0)


def test_a_member_runs_in_its_image_and_its_exit_code_is_the_command_s(shared: Rig) -> None:
    ref = fresh()
    shared.launch(ref, "sh", "-c", "ls / && echo $SHOAL_REF in $PWD && exit 125", image=IMAGE)
    assert shared.exit(ref).code == 125
    lines = shared.text(ref).splitlines()
    assert "work" not in lines
    assert "busybox" not in lines
    assert lines[-1].startswith(f"{ref} in {shared.directory}/members/{ref}")


def test_a_signal_reaches_every_process_in_a_container_and_default_actions_count(
    shared: Rig,
) -> None:
    """The first process of a container ignores what it does not handle, unlike outside."""
    ref = fresh()
    script = "trap 'echo bye; exit 7' TERM; echo up; while true; do sleep 0.1; done"
    shared.launch(ref, "sh", "-c", script, image=IMAGE)
    shared.says(ref, "up")
    shared.stop(ref, grace_ms=60_000)
    assert shared.exit(ref).code == 7
    assert "bye" in shared.text(ref)
    ref = fresh()
    shared.launch(ref, "sh", "-c", "echo up; exec sleep 1000", image=IMAGE)
    shared.says(ref, "up")
    shared.stop(ref, grace_ms=60_000)
    assert shared.exit(ref).code == 128 + signal.SIGTERM


def test_what_ignores_sigterm_is_killed_after_the_grace_time(shared: Rig) -> None:
    ref = fresh()
    shared.launch(ref, "sh", "-c", "trap '' TERM; echo up; sleep 1000", image=IMAGE)
    shared.says(ref, "up")
    shared.stop(ref, grace_ms=100)
    assert shared.exit(ref).code == 128 + signal.SIGKILL
