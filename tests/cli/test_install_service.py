"""`shoal install-service`: which units a machine gets, what is in them, what systemd says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from shoal.cli import boot
from shoal.cli.boot import Around, Unit, render
from shoal.control.home import ClusterConfig, Home
from tests.cli.conftest import Result, Shoal, assert_one_clear_line
from tests.needs import need_program


@pytest.fixture(autouse=True)
def units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where units are written. No systemd runs."""
    folder = tmp_path / "units"
    monkeypatch.setattr(boot, "SYSTEM_UNITS", folder / "system")
    monkeypatch.setattr(boot, "LINGER", folder / "linger")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\ncase "$*" in *--version) echo systemd 252;; *) echo offline; exit 1;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return folder


def head(path: Path, **fields: str) -> Path:
    home = Home(path)
    home.create()
    home.write_config(ClusterConfig(nodes=(), **fields))  # type: ignore[arg-type]
    return path


def joined(path: Path, name: str) -> Path:
    Home(path).create()
    folder = Home(path).node(name)
    folder.mkdir()
    (folder / "link.json").write_text("{}")
    (folder / "spec.json").write_text("{}")
    return path


def texts(shoal: Shoal, home: Path, *flags: str) -> dict[str, str]:
    """The units by name."""
    done = shoal("install-service", "--print", "--json", *flags, home=home)
    assert done.code == 0, done.err
    return {Path(one["path"]).name: one["text"] for one in json.loads(done.out)["units"]}


def refused(result: Result, words: str) -> None:
    assert_one_clear_line(result)
    assert words in result.err


def lines(text: str) -> set[str]:
    return set(text.splitlines())


def test_a_machine_gets_the_units_of_what_it_is(shoal: Shoal, tmp_path: Path) -> None:
    refused(shoal("install-service", "--print"), "first start a cluster")
    home = head(tmp_path / "a")
    assert set(texts(shoal, home)) == {"shoal-head.service"}
    refused(shoal("install-service", "--node", home=home), "first: shoal join")
    joined(home, "gpu7")
    both = texts(shoal, home)
    assert set(both) == {"shoal-head.service", "shoal-node-gpu7.service"}
    assert "After=network-online.target shoal-head.service" in lines(
        both["shoal-node-gpu7.service"]
    )
    assert set(texts(shoal, home, "--node")) == {"shoal-node-gpu7.service"}
    assert set(texts(shoal, home, "--head")) == {"shoal-head.service"}
    refused(
        shoal("install-service", "--head", home=joined(tmp_path / "b", "n")), "first with: shoal up"
    )
    assert not list(tmp_path.rglob("*.service"))


def test_jobs_outlive_the_process_of_a_unit_and_its_end_is_bounded(
    shoal: Shoal, tmp_path: Path
) -> None:
    for text in texts(shoal, joined(head(tmp_path / "a"), "gpu7")).values():
        for line in ("KillMode=process", "Delegate=yes", "OOMPolicy=continue", "TasksMax=infinity"):
            assert line in lines(text)
        assert "TimeoutStopSec=100" in text and "Restart=on-failure\n" in text
        assert "KillSignal" not in text  # SIGTERM


def test_a_database_on_this_machine_starts_first_and_its_password_stays_out(
    shoal: Shoal, tmp_path: Path
) -> None:
    for number, (url, here) in enumerate(
        (
            ("postgresql://me:secret@localhost/shoal", True),
            ("postgresql:///shoal", True),
            ("postgresql://me@/shoal?host=/var/run/postgresql", True),
            ("postgresql://me:secret@db.example:5432/shoal", False),
            ("", False),
        )
    ):
        home = head(tmp_path / str(number), database=url, shared="/mnt/all heads")
        text = texts(shoal, home)["shoal-head.service"]
        assert ("postgresql.service" in text) is here, url
        assert "secret" not in text
        assert '"/mnt/all heads"' in text.partition("RequiresMountsFor=")[2].splitlines()[0]


def test_the_shells_path_and_settings_go_into_the_unit_and_its_secrets_do_not(
    shoal: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CHECKPOINT_ROOT", "s3://bucket/50% of runs")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for name in ("SHOAL_JOIN_TOKEN", "AWS_SECRET_ACCESS_KEY", "NCCL_API_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, "hidden")
    text = texts(shoal, head(tmp_path / "a"))["shoal-head.service"]
    assert 'Environment="SHOAL_CHECKPOINT_ROOT=s3://bucket/50%% of runs"' in lines(text)
    assert "Environment=NCCL_DEBUG=INFO" in lines(text)
    assert f"Environment=PATH={os.environ['PATH']}" in lines(text)
    assert "hidden" not in text


def test_without_systemd_units_are_written_and_the_next_commands_are_printed(
    shoal: Shoal, tmp_path: Path, units: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = head(tmp_path / "a")
    done = shoal("install-service", "--user", home=home)
    path = units / "systemd" / "user" / "shoal-head.service"
    assert done.code == 0 and "systemd does not run here" in done.err
    assert "systemctl --user daemon-reload; systemctl --user enable --now shoal-head" in done.out
    assert "loginctl enable-linger" in done.out
    assert path.stat().st_mode & 0o777 == 0o644
    assert "User=" not in path.read_text() and "WantedBy=default.target" in path.read_text()
    assert "network-online" not in path.read_text()  # which only the system's units can name
    monkeypatch.setenv("PATH", str(tmp_path))  # not even systemctl
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    done = shoal("install-service", "--no-enable", home=home)
    assert done.code == 0 and not done.err and "enable --now shoal-head.service" in done.out
    assert (units / "system" / "shoal-head.service").exists()


def test_a_second_home_gets_its_own_unit_and_only_its_own_is_removed(
    shoal: Shoal, tmp_path: Path, units: Path
) -> None:
    homes = [head(tmp_path / name) for name in ("a", "b")]
    for home in (*homes, *homes):  # again: the same names
        assert shoal("install-service", "--user", home=home).code == 0
    folder = units / "systemd" / "user"
    assert len(list(folder.iterdir())) == 2
    assert "removed" in shoal("install-service", "--user", "--remove", home=homes[0]).out
    left = [path.name for path in folder.iterdir()]
    assert len(left) == 1 and left[0] != "shoal-head.service"
    assert "nothing to do" in shoal("install-service", "--user", "--remove", home=homes[0]).out


def test_a_unit_that_somebody_else_wrote_is_left_alone(
    shoal: Shoal, tmp_path: Path, units: Path
) -> None:
    mine = units / "systemd" / "user" / "shoal-head.service"
    mine.parent.mkdir(parents=True)
    mine.write_text("[Service]\nExecStart=/my/own\n")
    done = shoal("install-service", "--user", home=head(tmp_path / "a"))
    refused(done, "rename or remove it first")
    assert "/my/own" in mine.read_text()


def test_a_path_that_no_unit_can_hold_is_refused(shoal: Shoal, tmp_path: Path) -> None:
    done = shoal("install-service", "--print", home=head(tmp_path / "a\nExecStartPre=bad"))
    refused(done, "control character")


@pytest.mark.parametrize("own", [False, True], ids=["system", "user"])
@pytest.mark.parametrize("name", ["plain", 'a b "c" \\d', "100%h $HOME ${X} 'q'"])
def test_systemd_accepts_every_unit(own: bool, name: str, shoal: Shoal, tmp_path: Path) -> None:
    need_program("systemd-analyze")
    where = ("--user",) if own else ()
    home = joined(head(tmp_path / name, database="postgresql:///x", shared=f"/mnt/{name}"), "gpu7")
    folder = tmp_path / "check"
    folder.mkdir()
    for unit, text in texts(shoal, home, *where).items():
        assert ("User=" in text) is not own
        (folder / unit).write_text(text)
    files = sorted(map(str, folder.iterdir()))
    assert len(files) == 2
    done = subprocess.run(
        ["systemd-analyze", *where, "verify", "--man=no", *files],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    ours = [line for line in done.stderr.splitlines() if "shoal-" in line]
    assert done.returncode == 0 and not ours, done.stderr


def test_a_newer_systemd_keeps_jobs_in_the_units_own_group() -> None:
    around = Around(home="/h", env={}, systemd=254)
    unit = Unit(name="shoal-head.service", what="x", command=("/p",), around=around)
    assert "DelegateSubgroup=main" in lines(render(unit))
    old = msgspec.structs.replace(unit, around=msgspec.structs.replace(around, systemd=253))
    assert "DelegateSubgroup" not in render(old)
