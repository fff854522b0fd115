"""What travels with a job, and what does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shoal.forms.failure import BadField
from shoal.forms.pack import packed as send
from shoal.forms.readers import requirements_text
from shoal.link.packing import Package, PackError, pack
from shoal.model.job import PACKAGE_BYTES_MAX, JobSpec
from tests.cli.conftest import Shoal, assert_one_clear_line


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    write(root, tracked="1", untracked="2", ignored="3", gone="4", sub__deep__code="5")
    (root / ".gitignore").write_text("ignored\n")
    git(root, "init", "-q")
    git(root, "add", "tracked", "gone", "sub")
    (root / "gone").unlink()
    return root


def packed(folder: Path) -> Package:
    package = pack(folder)
    package.file.close()
    return package


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    with pack(folder).file as file, tarfile.open(fileobj=file) as tar:
        found = {}
        for member in tar:
            data = tar.extractfile(member)
            found[member.name] = (member.mode, data.read() if data else b"")
        return found


def test_what_git_knows_or_does_not_ignore_travels_as_it_is_now(project: Path) -> None:
    (project / "tracked").write_text("changed, not committed")
    found = content(project)
    assert sorted(found) == [".gitignore", "sub/deep/code", "tracked", "untracked"]
    assert found["tracked"] == (0o644, b"changed, not committed")


def test_a_job_that_may_leave_this_cluster_takes_its_folder_along(project: Path) -> None:
    sent: list[str] = []
    here = SimpleNamespace(
        remote=False,
        status=lambda: SimpleNamespace(engine="local"),
        send_package=lambda name, size, file: sent.append(name),
    )
    spec = JobSpec(command=("true",), workdir=str(project))
    assert send(cast(Any, here), spec, None) == spec
    away = send(cast(Any, here), msgspec.structs.replace(spec, cluster="any"), None)
    assert [away.package] == sent


def test_the_same_content_makes_the_same_package(project: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "under another name"
    shutil.copytree(project, copy, symlinks=True)
    os.utime(copy / "tracked", (1, 1))
    (copy / "tracked").chmod(0o600)
    first, second = packed(project), packed(copy)
    assert (first.sha256, first.size) == (second.sha256, second.size)
    (copy / "tracked").chmod(0o700)
    assert packed(copy).sha256 != first.sha256, "whether a file is a program matters"


def test_a_job_of_a_folder_brings_the_whole_repository(project: Path) -> None:
    package = packed(project / "sub")
    assert (package.root, package.folder) == (project, "sub")
    assert "tracked" in content(project / "sub")


def test_a_folder_that_git_ignores_travels_alone(project: Path) -> None:
    write(project, build__x="1")
    (project / ".gitignore").write_text("build\n")
    package = packed(project / "build")
    assert (package.root, package.folder) == (project / "build", "")
    assert sorted(content(project / "build")) == ["x"]


def test_an_empty_folder_is_there_all_the_same(project: Path) -> None:
    (project / "empty").mkdir()
    assert packed(project / "empty").folder == "empty"
    assert "empty" in content(project / "empty")


def test_without_git_all_travels_but_what_no_job_needs(tmp_path: Path) -> None:
    write(tmp_path, a="1", b__c="2", **{".venv__x": "3", "b____pycache__": ""})
    (tmp_path / "b" / "__pycache__").mkdir(exist_ok=True)
    write(tmp_path / "b" / "__pycache__", pyc="4")
    assert {"a", "b/c"} <= set(content(tmp_path))
    assert not any("venv" in name or "pycache__/" in name for name in content(tmp_path))


def test_a_repository_within_the_repository_travels_too(project: Path) -> None:
    write(project / "inner", code="1", dirt="2")
    (project / "inner" / ".gitignore").write_text("dirt\n")
    git(project / "inner", "init", "-q")
    assert {"inner/code", "inner/.gitignore"} <= set(content(project))
    assert "inner/dirt" not in content(project)
    assert not any(name.startswith("inner/.git/") for name in content(project))


def test_links_stay_within_it_and_what_is_no_file_stays_behind(project: Path) -> None:
    (project / "near").symlink_to("sub/deep/code")
    (project / "sub" / "up").symlink_to("../tracked")
    (project / "far").symlink_to("/etc/passwd")
    (project / "sub" / "out").symlink_to("../../outside")
    package = packed(project)
    assert package.left_behind == ("far", "sub/out")
    assert {"near", "sub/up"} <= set(content(project))


def test_five_gigabytes_are_refused_without_being_read(project: Path) -> None:
    (project / "data").mkdir()
    with (project / "data" / "set.bin").open("wb") as file:
        file.truncate(5 * 10**9)
    with pytest.raises(PackError) as refused:
        pack(project)
    message = str(refused.value)
    assert f"is 5.0 GB, and at most {PACKAGE_BYTES_MAX / 1e9:.1f} GB" in message
    assert "data (5.0 GB)" in message and ".gitignore" in message


def test_the_clusters_own_files_do_not_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, code="1", home__token="secret")
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    assert sorted(content(tmp_path)) == ["code"]


def test_tokens_of_logins_do_not_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / ".config" / "shoal", contexts="secret")
    write(tmp_path / ".shoal", token="secret")
    write(tmp_path, train="x")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert list(content(tmp_path)) == ["train"]


def test_a_link_to_itself_stays_behind(project: Path) -> None:
    (project / "loop").symlink_to("loop")
    assert "loop" not in content(project)
    assert packed(project).left_behind == ("loop",)


def test_a_large_folder_is_one_line_at_the_command_line(live_shoal: Shoal, tmp_path: Path) -> None:
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(5 * 10**9)
    result = live_shoal("run", "--pack", "--workdir", str(tmp_path), "--", "true")
    assert_one_clear_line(result)
    assert "workdir" in result.err and "weights.bin (5.0 GB)" in result.err
    assert "make it a git repository with a .gitignore" in result.err


def test_a_folder_that_is_not_there_is_one_line(live_shoal: Shoal, tmp_path: Path) -> None:
    result = live_shoal("run", "--pack", "--workdir", str(tmp_path / "none"), "--", "true")
    assert_one_clear_line(result)
    assert "is gone" in result.err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "lists no packages"),
        ("# only words\n", "lists no packages"),
        ("numpy\n-r more.txt\n", "line 2: '-r more.txt' names a file of this machine"),
        ("-e .\n", "line 1"),
        ("./mine.whl\n", "line 1"),
        ("a" * 70_000, "longer than 64 KiB"),
        ("a\0b", "NUL"),
    ],
)
def test_requirements_that_would_mean_something_else_there(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text(text)
    with pytest.raises(BadField, match=complaint):
        requirements_text("requirements", str(path))


def test_requirements_that_mean_the_same_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    text = "numpy>=2  # sums\n-e git+https://host/x#egg=x\n--find-links /wheels\nemoji\n"
    path.write_text(text)
    assert requirements_text("requirements", str(path)) == text


def test_requirements_that_are_not_there_are_one_line(shoal: Shoal, tmp_path: Path) -> None:
    for words in (["--requirements", "none.txt"], ["--requirements", str(tmp_path)]):
        result = shoal("run", *words, "--", "true")
        assert_one_clear_line(result)
        assert "requirements" in result.err


def test_a_job_file_says_that_it_travels(live_shoal: Shoal, tmp_path: Path) -> None:
    write(tmp_path, code="hello")
    job = tmp_path / "job.yaml"
    job.write_text("command: cat code\npack: true\nworkdir: .\n")
    result = live_shoal("run", str(job), "--wait")
    assert (result.code, result.out) == (0, "hello"), result.err
    job.write_text("command: cat code\npack: perhaps\n")
    result = live_shoal("run", str(job))
    assert_one_clear_line(result)
    assert "pack: must be true or false" in result.err


def test_a_traveling_job_cannot_write_where_it_runs(live_shoal: Shoal, tmp_path: Path) -> None:
    """As root nothing is forbidden: the modes tell."""
    write(tmp_path, sub__code="hello")
    script = "stat -c %a . code; cat code; echo x > $SHOAL_SCRATCH/mine && ls $SHOAL_PACKAGE"
    where = str(tmp_path / "sub")
    result = live_shoal("run", "--pack", "--workdir", where, "--wait", "--", "sh", "-c", script)
    assert (result.code, result.out.split()) == (0, ["555", "444", "hellocode"]), result


def test_the_whole_machine_does_not_travel() -> None:
    with pytest.raises(PackError, match="/ is the whole machine; go to your project's folder"):
        pack(Path("/"))


def test_what_git_ignores_is_named_with_its_size(project: Path) -> None:
    (project / ".gitignore").write_text("ignored\ndata/\n.venv\n__pycache__\n")
    write(project, data__train="x" * 5_000, data__test="y" * 100)
    (project / ".venv").mkdir()
    (project / ".venv" / "python").write_text("z" * 9_000)
    ignored = packed(project).ignored
    assert ignored is not None
    assert (ignored.files, ignored.size) == (3, 5_101)
    assert ignored.largest == (("data/", 5_100), ("ignored", 1))
    assert "3 files, 5.1 kB: data/ (5.1 kB), ignored (1 bytes); `git add -f`" in ignored.text
    git(project, "add", "-f", "data", "ignored")  # as it advises
    assert packed(project).ignored is None
    assert "data/train" in content(project)


def test_an_environment_that_requirements_hide_is_told() -> None:
    from shoal.forms.pack import hidden_environment
    from shoal.model.job import JobSpec

    spec = JobSpec(command=("python",), env={"VIRTUAL_ENV": "/home/me/venv"})
    assert hidden_environment(spec) == ""
    told = hidden_environment(msgspec.structs.replace(spec, requirements="numpy"))
    assert "not the others of /home/me/venv" in told


@pytest.mark.parametrize(
    ("flags", "wanted"), [((), None), (("--pack",), True), (("--no-pack",), False)]
)
def test_whether_the_folder_is_sent_is_what_the_flag_says(
    flags: tuple[str, ...], wanted: bool | None
) -> None:
    from shoal.cli.request import assemble_jobs
    from shoal.cli.verbs.run import run
    from shoal.forms.fields import JOB

    given = run.make_context("run", [*flags, "--", "true"]).params
    fields = {name: value for name, value in given.items() if name in JOB}
    assert assemble_jobs(["true"], fields)[1] is wanted
