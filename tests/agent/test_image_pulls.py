"""Images come from a registry: once per node, with progress, and a failure says what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.agent.images.pull import Progress, not_started, problem_in
from shoal.model.job import Fault, MemberRef
from shoal.model.secret import SecretsOf
from tests.agent.rig import Rig, rig
from tests.podman import Podman, podman
from tests.registry import Registry, registry

numbers = iter(range(1, 1000))


@pytest.fixture(scope="module")
def store() -> Iterator[Podman]:
    with podman() as made:
        yield made


@pytest.fixture(scope="module")
def images(store: Podman) -> Iterator[Registry]:
    with registry(store.layer) as made:
        yield made


@pytest.fixture(scope="module")
def node(store: Podman, images: Registry) -> Iterator[Rig]:
    with rig(**store.env, **images.settings(store.folder)) as made:
        yield made


def fresh() -> MemberRef:
    return MemberRef(f"j{next(numbers)}", 1, 0)


def getting(node: Rig, ref: MemberRef) -> str:
    report = node.ask()
    return next((one.what for one in report.getting if one.ref == ref), "")


def test_a_pull_that_nobody_waits_for_any_more_is_stopped(node: Rig, images: Registry) -> None:
    ref = fresh()
    image = images.image.replace("work:1", "work:1@" + images.digest)
    node.launch(ref, "true", image=image)
    node.until(lambda: images.layers_sent > 0)
    node.stop(ref)
    assert node.exit(ref).why == "stopped before it started"
    needle = os.fsencode(images.digest)
    node.wait(lambda: not any(needle in line for line in command_lines()))


def test_two_members_wait_for_one_pull_and_see_how_far_it_is(node: Rig, images: Registry) -> None:
    first, second = fresh(), fresh()
    before = images.layers_sent
    script = "echo $OF_THE_IMAGE of the image"
    for ref in (first, second):
        node.launch(ref, "sh", "-c", script, image=images.image)
    for ref in (first, second):
        half = f"is pulling {images.image}: 5"  # a little more than half, by the processor's kind
        node.until(lambda ref=ref, half=half: getting(node, ref).startswith(half))  # type: ignore[misc]
    assert not node.ask().alive
    images.open.set()
    assert node.exit(first).code == node.exit(second).code == 0
    assert node.text(first) == "1 of the image\n"
    assert images.layers_sent == before + 1


def command_lines() -> list[bytes]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                found.append(Path(f"/proc/{name}/cmdline").read_bytes())
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    ("name", "words", "fault"),
    [
        ("{host}/absent:1", "there is no such image", Fault.NONE),
        ("localhost/absent", "there is no image localhost/absent on this node", Fault.MISSING),
        ("127.0.0.1:1/work:1", "its registry cannot be reached from this node", Fault.MISSING),
    ],
)
def test_an_image_that_cannot_be_had_is_a_clear_reason(
    node: Rig, images: Registry, name: str, words: str, fault: Fault
) -> None:
    ref = fresh()
    node.launch(ref, "true", image=name.format(host=images.host))
    exit_ = node.exit(ref)
    assert words in exit_.why
    assert exit_.fault is fault
    assert exit_.code == 127


def test_a_tenant_uses_its_own_credentials_even_for_an_image_that_is_here(
    node: Rig, images: Registry
) -> None:
    """Otherwise one tenant's private images would be everyone's who shares a node with it."""
    images.login = "red:pass:word"
    with_it, without = fresh(), fresh()
    node.secrets[with_it] = SecretsOf(with_it, registry=b"red:pass:word\n")
    node.launch(with_it, "id", image=images.image, uid=70_001, tenant="red")
    assert node.exit(with_it).code == 0
    assert "uid=70001" in node.text(with_it)
    node.launch(without, "id", image=images.image, uid=70_002, tenant="blue")
    exit_ = node.exit(without)
    assert "is there a secret registry-127.0.0.1-" in exit_.why
    assert "pass:word" not in node.log()
    assert not list(Path("/dev/shm").glob("shoal-*/registry-*"))


def test_the_progress_of_docker_is_read_as_well() -> None:
    progress = Progress()
    assert str(progress) == ""
    progress.take("0a1b2c3d4e5f: Downloading [==>   ]  1.5MB/3MB\r\n")
    progress.take("1a1b2c3d4e5f: Downloading [>     ]  0.5kB/1MB\r\n")
    assert str(progress) == ": 38 %"
    progress.take("1a1b2c3d4e5f: Pull complete\n0a1b2c3d4e5f: Pull complete\n")
    assert str(progress) == ": 100 %"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("write /var/lib/x: no space left on device", Fault.START),
        ("Error response from daemon: pull access denied for x, repository does not exist", ""),
        ('Error response from daemon: Head "http://x/v2/": no basic auth credentials', ""),
        ("FATAL: While making image from oci registry: unexpected EOF", Fault.MISSING),
        ("something new", Fault.MISSING),
    ],
)
def test_whose_fault_a_failed_pull_is(text: str, fault: str) -> None:
    assert problem_in(text).fault == fault


@pytest.mark.parametrize(
    "said",
    [
        'Error: command required for rootless mode with multiple IDs: exec: "newuidmap": '
        "executable file not found in $PATH",
        'Error: cannot set up namespace using "/usr/bin/newuidmap": exit status 1',
        "potentially insufficient UIDs or GIDs available in user namespace (requested 0:42 for "
        "/etc/shadow): Check /etc/subuid and /etc/subgid",
    ],
)
def test_a_podman_that_cannot_map_users_is_not_a_missing_image(said: str) -> None:
    """As podman 4 and 5 print it, when it pulls and when it starts a container."""
    assert "install newuidmap" in problem_in(said).why
    why, fault = not_started(said, "python")
    assert "uid" in why and "no program" not in why
    assert problem_in(said).fault is fault is Fault.MISSING
