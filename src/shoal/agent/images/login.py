"""Credentials for a registry: in memory, for as long as a pull takes, on no command line."""

from __future__ import annotations

import base64
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from shoal.agent.faults import CannotStart
from shoal.kernel import memory_folder

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
