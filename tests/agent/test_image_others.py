"""Small programs stand in for docker and apptainer: they take the words they are given and run the
command outside of any container. A real docker is in test_docker.py."""

from __future__ import annotations

from pathlib import Path

from shoal.model.job import MemberRef
from tests.agent.rig import rig

DOCKER = r"""#!/bin/sh
echo "$*" >> "$0.words"
case $1 in
pull) echo "Error response from daemon: manifest for $2 not found" >&2; exit 1 ;;
image) [ "$3" = here:1 ] ;;
inspect) echo "2026-11-18T10:34:11.5Z false" ;;
run)
    for word in "$@"; do
        case $word in --env-file=*) file=${word#*=} ;; esac
    done
    while read -r line; do export "$line"; done < "$file"
    while [ "$1" != here:1 ]; do shift; done
    shift
    exec "$@" ;;
esac
"""
APPTAINER = r"""#!/bin/sh
echo "$*" >> "$0.words"
case $1 in
pull) touch "$3" ;;
exec)
    while :; do case $1 in *.sif) break ;; esac; shift; done
    shift
    NAME=$APPTAINERENV_NAME exec "$@" ;;
esac
"""


def stand_in(folder: Path, name: str, text: str) -> dict[str, str]:
    program = folder / name
    program.write_text(text)
    program.chmod(0o755)
    return {"SHOAL_CONTAINERS": str(program)}


def test_docker_is_called_as_it_wants_to_be(tmp_path: Path) -> None:
    with rig(**stand_in(tmp_path, "docker", DOCKER)) as node:
        assert node.report is not None
        assert node.report.spec.containers == "docker"
        ref, absent = MemberRef("j1", 1, 0), MemberRef("j2", 1, 0)
        env = {"NAME": "a name"}
        node.launch(ref, "sh", "-c", "echo $NAME; exit 3", env=env, image="here:1")
        assert node.exit(ref).code == 3
        assert node.text(ref) == "a name\n"
        node.launch(absent, "true", image="absent:1")
        assert node.exit(absent).why.startswith("cannot pull absent:1: there is no such image")
    words = (tmp_path / "docker.words").read_text().splitlines()
    assert words[0] == "image inspect here:1"
    assert words[1].startswith("run --pull=never --name=shoal-")
    assert words[1].endswith("--entrypoint= here:1 sh -c echo $NAME; exit 3")
    assert "pull absent:1" in words


def test_apptainer_is_called_as_it_wants_to_be(tmp_path: Path) -> None:
    with rig(**stand_in(tmp_path, "apptainer", APPTAINER)) as node:
        for number in (1, 2):
            ref = MemberRef("j1", number, 0)
            env = {"NAME": "a name"}
            node.launch(ref, "sh", "-c", "echo $NAME; exit 3", env=env, image="docker.io/work:1")
            assert node.exit(ref).code == 3
            assert node.text(ref) == "a name\n"
    words = [line.split()[0] for line in (tmp_path / "apptainer.words").read_text().splitlines()]
    assert words == ["pull", "exec", "exec"]
