"""Which members can start from a warm interpreter, from which one, and what it should hold."""

from __future__ import annotations

import os
import re
import shutil
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from shoal.core.phases.reserved import FLAGS, RENDEZVOUS

# Variables that differ between the members and attempts of one job. Shoal sets them, and no
# preloaded library reads them at import. Everything else must be equal.
TRACKERS = {"WANDB_RUN_GROUP", "WANDB_NAME", "MLFLOW_RUN_CONTEXT"}  # read when a run begins
VARYING = RENDEZVOUS | FLAGS | TRACKERS | {"CUDA_VISIBLE_DEVICES"}
VARYING_PREFIX = "SHOAL_"
# Options that a warm interpreter is started with like the cold one; any other means a cold start.
OPTIONS = frozenset(("-u", "-B", "-O", "-OO"))
INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?$")
SHEBANG_BYTES_MAX = 256

# A process that has mapped a library of the package on the left imports the modules on the right,
# or will soon: the first step of an optimizer imports torch._dynamo, and shoal.train is light.
# Modules that are not installed are skipped.
PRELOADED = {
    "numpy": ("numpy", "numpy.random"),
    "torch": (
        "torch",
        "torch.distributed",
        "torch.utils.data",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint.state_dict",
        "shoal.train",
        "fsspec.implementations.local",
    ),
    "torchvision": ("torchvision",),
    "PIL": ("PIL.Image",),
    "pandas": ("pandas",),
    "scipy": ("scipy",),
    "safetensors": ("safetensors.torch",),
    "tokenizers": ("tokenizers",),
}
HEAVY = frozenset(("torch",))  # takes seconds to import: only that is worth the memory
LIBRARY = re.compile(r"/(?:site|dist)-packages/([A-Za-z_]\w*)/\S*\.so", re.ASCII)


class Recipe(msgspec.Struct, frozen=True):
    """How to start a member from a warm interpreter; `key` says which interpreters would do."""

    interpreter: str
    options: tuple[str, ...]
    target: str  # a script or, if `module`, a module's name
    module: bool
    args: tuple[str, ...]
    argv: tuple[str, ...]
    folder: str  # the first place where the script's imports are looked up
    place: str  # the directory that the interpreter is started in
    env: dict[str, str]
    key: str


def recipe(
    program: str, argv: Sequence[str], env: Mapping[str, str], workdir: str
) -> Recipe | None:
    """None if only a cold start does exactly what was asked for."""
    try:
        return _recipe(program, argv, env, workdir)
    except OSError:
        return None  # something is wrong; a cold start will report it


def wanted_modules(maps: str) -> tuple[str, ...]:
    """What to preload for a process with these memory maps; nothing if nothing heavy is mapped."""
    packages = set(LIBRARY.findall(maps))
    if not packages & HEAVY:
        return ()
    return tuple(
        module
        for package, modules in PRELOADED.items()
        if package in packages
        for module in modules
    )


def default_modules() -> tuple[str, ...]:
    """What to preload for a job that has not run here yet."""
    return PRELOADED["numpy"] + PRELOADED["torch"]


def shadowed(folder: str, names: frozenset[str]) -> str:
    """A file beside the script that would shadow an already imported module."""
    try:
        entries = os.listdir(folder)
    except OSError:
        return folder
    return next((entry for entry in entries if entry.partition(".")[0] in names), "")


def _recipe(
    program: str, argv: Sequence[str], env: Mapping[str, str], workdir: str
) -> Recipe | None:
    words = list(argv[1:])
    interpreter = program
    if not INTERPRETER.match(os.path.basename(program)):
        found = _shebang(program, env.get("PATH", os.defpath))
        if found is None:
            return None
        interpreter, words = found, [program, *words]
    options = []
    while words and words[0] in OPTIONS:
        options.append(words.pop(0))
    module = words[:1] == ["-m"]
    if module:
        words.pop(0)
    if not words or words[0].startswith("-") or env.get("PYTHONINSPECT"):
        return None
    target, *args = words
    folder = workdir
    if not module:
        path = os.path.join(workdir, target)
        if not _is_source(path):
            return None
        folder = os.path.dirname(os.path.realpath(path))
    if not os.access(workdir, os.X_OK):
        return None
    place = workdir if _depends_on_place(env) else "/"
    constant = {
        name: value
        for name, value in env.items()
        if name not in VARYING and not name.startswith(VARYING_PREFIX)
    }
    status = os.stat(interpreter)
    key = repr(
        (interpreter, status.st_ino, status.st_mtime_ns, options, place, sorted(constant.items()))
    )
    return Recipe(
        interpreter,
        tuple(options),
        target,
        module,
        tuple(args),
        (interpreter, *argv[1:]) if interpreter == program else (interpreter, *options, *words),
        folder,
        place,
        constant,
        key,
    )


def _shebang(program: str, path: str) -> str | None:
    """The interpreter of a Python script that is itself a program."""
    line = _first_line(program)
    if not line.startswith(b"#!"):
        return None
    words = os.fsdecode(line[2:]).split()
    if len(words) == 2 and os.path.basename(words[0]) == "env":
        found = shutil.which(words[1], path=path)
        words = [found] if found else []
    if len(words) == 1 and INTERPRETER.match(os.path.basename(words[0])):
        return words[0] if os.access(words[0], os.X_OK) else None
    return None


LINES_MAX = 256
SETTLED_NS = 1_000_000_000  # what changes again in the same tick of the clock would not be seen
_lines: dict[str, tuple[tuple[int, ...], bytes]] = {}  # of programs, and which file that was


def _first_line(program: str) -> bytes:
    """Most programs are no scripts, so this takes as few system calls as it can. It does not wait:
    what is called a program may be a pipe."""
    info = os.stat(program)
    stamp = info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
    known = _lines.get(program)
    if known is not None and known[0] == stamp:
        return known[1]
    handle = os.open(program, os.O_RDONLY | os.O_NONBLOCK)
    try:
        line = os.read(handle, SHEBANG_BYTES_MAX).partition(b"\n")[0]
    finally:
        os.close(handle)
    if time.time_ns() - info.st_ctime_ns > SETTLED_NS:
        if len(_lines) >= LINES_MAX:
            _lines.clear()
        _lines[program] = stamp, line
    return line


def _is_source(path: str) -> bool:
    return (
        os.path.isfile(path)
        and os.access(path, os.R_OK)
        and Path(path).suffix != ".pyc"
        and not zipfile.is_zipfile(path)
    )


def _depends_on_place(env: Mapping[str, str]) -> bool:
    """Relative entries of PYTHONPATH become absolute when the interpreter starts."""
    path = env.get("PYTHONPATH", "")
    return bool(path) and not all(part.startswith("/") for part in path.split(":"))
