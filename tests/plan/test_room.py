"""The room is pure: a plan depends on nothing but its arguments and its data files."""

from __future__ import annotations

import ast
from pathlib import Path

import shoal.plan

ROOM = Path(shoal.plan.__file__).parent
ALLOWED = {
    "__future__", "bisect", "collections", "difflib", "functools", "heapq", "itertools", "math",
    "msgspec", "pathlib", "random", "statistics", "tomllib", "typing",
}  # fmt: skip


def test_the_room_imports_nothing_that_reads_the_world() -> None:
    strangers = set()
    for path in sorted(ROOM.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                own = name == "shoal.plan" or name.startswith(("shoal.plan.", "shoal.model."))
                if not own and name.partition(".")[0] not in ALLOWED:
                    strangers.add(f"{path.name}: {name}")
    assert strangers == set()


def test_chance_has_a_seed() -> None:
    """So the same question has the same answer."""
    for path in sorted(ROOM.glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "random":
                assert call.attr == "Random", path.name
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "random.Random":
                assert call.args, path.name


def test_only_the_library_reads_files() -> None:
    readers = {path.name for path in ROOM.glob("*.py") if "read_text" in path.read_text()}
    assert readers == {"library.py"}
