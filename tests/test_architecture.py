"""The house rules that a linter cannot know."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path

import conftest
import pytest

from shoal.calls.table import TABLE
from tests.state_writes import writes

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shoal"
FILES = sorted([*SOURCE.rglob("*.py"), *(ROOT / "storm").rglob("*.py")])
PURE = sorted([*(SOURCE / "core").rglob("*.py"), *(SOURCE / "model").rglob("*.py")])

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70

# All that the pure half may use of the standard library. A list of what is allowed cannot miss
# the next module that reads a clock.
PURE_IMPORTS = {
    "__future__",
    "bisect",
    "collections",
    "enum",
    "fnmatch",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "hmac",
    "itertools",
    "math",
    "msgspec",
    "operator",
    "re",
    "shoal",
    "typing",
    "weakref",  # equal specs are one object, for as long as a job has it
    "zlib",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT))


@cache  # most rules look at every file
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def places(paths: Sequence[Path], search: Callable[[ast.Module], Iterator[ast.AST]]) -> list[str]:
    """Where a search finds something: file, line and what stands there."""
    return [
        f"{name_of(path)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node).splitlines()[0]}"
        for path in paths
        for node in search(tree_of(path))
    ]


# -- the pure half -------------------------------------------------------------------------


def test_model_and_core_import_nothing_that_reads_the_world() -> None:
    def strangers(tree: ast.Module) -> Iterator[ast.AST]:
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = ["." * node.level + (node.module or "")]
            for name in names:
                top, _, rest = name.partition(".")
                inside = top != "shoal" or rest.partition(".")[0] in ("model", "core")
                if top not in PURE_IMPORTS or not inside:
                    yield node

    assert places(PURE, strangers) == []


def test_model_and_core_call_nothing_that_reads_the_world() -> None:
    forbidden = {"open", "print", "input", "hash", "id", "exec", "eval", "globals", "__import__"}

    def calls(tree: ast.Module) -> Iterator[ast.AST]:
        return (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in forbidden
        )

    assert places(PURE, calls) == []


def test_the_map_lists_the_phases_of_a_step_in_their_order() -> None:
    tree = tree_of(SOURCE / "core" / "step.py")
    (body,) = [node for node in tree.body if getattr(node, "name", "") == "step"]
    calls = [
        (node.lineno, node.col_offset, node.func.id)
        for node in ast.walk(body)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    phases = [name for _, _, name in sorted(calls) if name.islower() and name != "adopt_functions"]
    shown = (ROOT / "docs" / "ARCHITECTURE.md").read_text().split("## One idea", 1)[1]
    listed = re.findall(r"^ {8}(\w+) {2,}\S", shown.split("The live controller", 1)[0], re.M)
    assert listed == phases


def test_the_map_lists_every_feature_with_its_calls_and_its_view() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    section = text.split("## Where a feature is", 1)[1].split("\n## ", 1)[0]
    rows = [re.split(r" ?\| ?", line) for line in section.splitlines() if line.startswith("| `")]
    features = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (SOURCE / "core/features").iterdir()
        if not path.name.startswith("__")
    }
    assert {row[1].strip("`") for row in rows} == features and len(rows) == len(features)
    named = {path for row in rows for path in re.findall(r"`(/v1[^`]*)`", row[3])}
    assert named - {call.path for call in TABLE} == set()
    views = {name for row in rows for name in re.findall(r"`([^`]+)`", row[5])}
    assert {name for name in views if not (SOURCE / "web" / name).exists()} == set()


def test_no_files_of_the_pure_half_import_each_other_in_a_circle() -> None:
    """Also for types alone, and inside functions: a circle cannot be read from any end."""
    modules = {
        "shoal." + ".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in PURE
    }
    imports = {name: set(imports_of(tree_of(path))) for name, path in modules.items()}
    left = {name: found & modules.keys() for name, found in imports.items()}
    while ready := [name for name, found in left.items() if not found & left.keys()]:
        for name in ready:
            del left[name]
    assert sorted(left) == [], "these are in a circle, or import one that is"


def imports_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_core_never_goes_through_a_set_in_no_order() -> None:
    """The order of a set differs from run to run, and so would the decisions."""
    assert places(PURE, unordered_walks) == []


def unordered_walks(tree: ast.Module) -> Iterator[ast.AST]:
    """Loops and conversions to a sequence over what is plainly a set, or a name given one."""
    known = set_names(tree)
    for node in ast.walk(tree):
        walked: list[ast.expr] = []
        if isinstance(node, ast.For):
            walked = [node.iter]
        elif isinstance(node, (ast.ListComp, ast.DictComp)):
            # A comprehension that makes a set again, or a generator (mostly inside any, all, sum
            # or sorted), may go through a set in any order.
            walked = [generator.iter for generator in node.generators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("list", "tuple", "iter", "enumerate", "next"):
                walked = node.args
        elif isinstance(node, (ast.List, ast.Tuple)):
            walked = [item.value for item in node.elts if isinstance(item, ast.Starred)]
        yield from (expression for expression in walked if is_set(expression, known))


def set_names(tree: ast.Module) -> set[str]:
    """Names and attributes that are assigned or annotated as sets somewhere in the file."""
    names = {".masters", ".hopeless"}  # the state's own sets, wherever they are used
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_set(node.value, set()):
            names |= {target_name(target) for target in node.targets}
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("set["):
            names.add(target_name(node.target))
    return names - {""}


def target_name(target: ast.expr) -> str:
    if isinstance(target, ast.Name):
        return target.id
    return f".{target.attr}" if isinstance(target, ast.Attribute) else ""


def is_set(expression: ast.expr, known: set[str]) -> bool:
    if isinstance(expression, (ast.Set, ast.SetComp)):
        return True
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name):
        return expression.func.id in ("set", "frozenset")
    if isinstance(expression, ast.BinOp):
        return is_set(expression.left, known) or is_set(expression.right, known)
    return target_name(expression) in known


def test_the_search_for_unordered_walks_finds_them() -> None:
    wrong = [
        "for x in set(y): pass",
        "for x in {1, 2}: pass",
        "for x in {y for y in z}: pass",
        "a = {1}\nfor x in a: pass",
        "a: set[int] = f()\nb = [x for x in a]",
        "list(set(y) - z)",
        "for x in state.masters: pass",
        "a = [*{1}, *b]",
    ]
    right = [
        "for x in sorted(set(y)): pass",
        "a = {1}\nb = {x for x in a}",
        "for x in {1: 2}: pass",
        "any(x for x in set(y))",
        "a = {*set(y)}",
    ]
    assert [bool(list(unordered_walks(ast.parse(text)))) for text in wrong] == [True] * len(wrong)
    assert [bool(list(unordered_walks(ast.parse(text)))) for text in right] == [False] * len(right)


# Who comes first and what is cheaper may be a ratio: it is compared, never counted with.
RATIOS = {
    "core/state/accounts.py",
    "core/scheduling/classic.py",
    "core/books/filling.py",
    "core/books/foresight.py",
    "core/scheduling/preempt.py",
    "core/scheduling/score.py",
}


def test_fractions_are_made_only_where_a_text_for_people_is_written() -> None:
    """Time is integer milliseconds: what is divided may be shown, never decided upon."""
    assert places([path for path in PURE if name_of(path) not in RATIOS], fractions) == []


def fractions(tree: ast.Module) -> Iterator[ast.AST]:
    shown = {
        id(part)
        for text in ast.walk(tree)
        if isinstance(text, ast.JoinedStr)
        for part in ast.walk(text)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and all(
            target_name(target).endswith("_s") for target in node.targets
        ):
            shown |= {id(part) for part in ast.walk(node)}  # seconds are for reading
    for node in ast.walk(tree):
        divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        broken = isinstance(node, ast.Constant) and isinstance(node.value, float)
        if (divides or broken) and id(node) not in shown:
            yield node


# -- the state -----------------------------------------------------------------------------


OTHERS = ("__init__.py", "base.py", "log.py")  # of the events: these declare none


def test_only_apply_changes_facts_and_indexes() -> None:
    """All else goes through an event, or belongs into `heard`, `agenda` or `caches` (ADR 23)."""
    state = SOURCE / "core" / "state"
    events = {*state.glob("events/*.py")} - {state / "events" / name for name in OTHERS}
    allowed = {*state.glob("apply_*.py"), state / "load.py", *events}
    assert places([path for path in FILES if path not in allowed], writes) == []
    for path in allowed:
        assert list(writes(tree_of(path))), f"{path} needs no pass"


IMPORTS = """
from shoal.core.books.failures import failed
from shoal.core.state.room import Room
from shoal.core.state.state import Node, State
from shoal.model.job import Job, Member
from heapq import heappush
"""


@pytest.mark.parametrize(
    "body",
    [
        "state.next_job += 1",
        "round_.state.epoch = 3",
        "self._state.jobs['j1'] = 1",
        "del state.claims['j1']",
        "state.jobs.pop('j1')",
        "state.queue.remove(job, 0)",
        "state.queue.lanes.clear()",
        "state.accounts.change('lab', 1, 1, 1, 1)",
        "state.foresight.saw(task)",
        "heappush(state.limits, (1, 'j1', 1))",
        "failed(state.failures, 'j1', failure)",
        "job.why = 'x'",
        "job.members.append(1)",
        "job.members[0].status = 1",
        "for one in job.members:\n        one.code = 1",
        "for ref, other in list(state.placed['n1'].items()):\n        other.elder = True",
        "jobs, now_ms = state.jobs, 1\n    jobs['j1'] = 1",
        "first = next(iter(state.jobs.values()))\n    first.phase = 1",
        "waiting = [job for job in state.jobs.values()]\n    waiting[0].phase = 1",
        "found = sorted(state.jobs.values())\n    for one in found:\n        one.phase = 1",
        "one = state.job_numbered(1)\n    one.attempt += 1",
        "room.change(slice_, -1)",
        "state.rooms[0].change(slice_, -1)",
        "if (one := state.jobs.get('j1')) is not None:\n        one.why = 'x'",
        "self._job = job\n    self._job.attempt = 2",
        "node.record, x = 1, 2",
    ],
)
def test_the_search_for_writes_finds_them(body: str) -> None:
    text = f"{IMPORTS}def f(self, state: State, job: Job, node: Node, room: Room):\n    {body}\n"
    assert list(writes(ast.parse(text)))


@pytest.mark.parametrize(
    "body",
    [
        "state.heard.contacts['n1'] = 1",
        "state.agenda.attention.clear()",
        "state.agenda.look_ms = 0",
        "waiting = [job for job in state.jobs.values()]\n    waiting.append(job)",
        "names = sorted(state.jobs)\n    names.pop()",
        "copied = state.rooms[0].copy()\n    copied.change(slice_, -1)",
        "apply(state, event)",
        "found = {}\n    found[job.id] = job",
        "self.job = job",
        "book = FailureBook()\n    failed(book, job.id, failure)",
    ],
)
def test_the_search_for_writes_finds_nothing_else(body: str) -> None:
    text = f"{IMPORTS}def f(self, state: State, job: Job, node: Node, room: Room):\n    {body}\n"
    assert list(writes(ast.parse(text))) == []


def test_the_invariants_share_nothing_with_what_they_verify() -> None:
    """They read fields. They call no method of the state and no code of the scheduler, and those of
    a feature, at the end of its file, call nothing above them."""
    features = sorted((SOURCE / "core/features").rglob("*.py"))
    begins = {path: at for path in features if (at := begin_of_invariants(path))}
    parts = {name for path, at in begins.items() for name, line in tops(tree_of(path)) if line > at}
    wrong = {name_of(path): list(shared(tree_of(path), at)) for path, at in begins.items()}
    wrong["invariants"] = list(shared(tree_of(SOURCE / "core/invariants.py"), 0, parts))
    assert len(begins) > 5
    assert {name: nodes for name, nodes in wrong.items() if nodes} == {}
    for text in (
        "from shoal.core.state.room import Domain\nx = Domain()",
        "from shoal.core.scheduling.fit import fit\nx = all(map(fit, []))",
        "\nstate.job_numbered(3)",
        "\nstate.queue.first()",
        "\nheld_by('lab')",
        "def f(): ...\ndef g(): return map(f, [])",
    ):
        assert list(shared(ast.parse(text), 1)), text


def begin_of_invariants(path: Path) -> int:
    lines = path.read_text().splitlines()
    return next((at for at, text in enumerate(lines, 1) if text.startswith(INVARIANTS)), 0)


INVARIANTS = "# -- what always holds, in code that shares nothing with the code above"
# Methods of lists, dicts, sets and texts, and functions of the language.
PLAIN = {"add", "append", "count", "get", "items", "startswith", "update", "values"}
PLAIN |= {"partition", "pop", "replace", "setdefault", "split"}
BUILTIN = {"all", "any", "dict", "enumerate", "getattr", "isinstance", "len", "list", "max", "set"}
BUILTIN |= {"bool", "fromkeys", "map", "range", "sorted", "sum", "tuple", "zip", "Counter"}


def tops(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What a module defines, with its line."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        for target in node.targets if isinstance(node, ast.Assign) else ():
            yield ast.unparse(target), node.lineno


def shared(tree: ast.Module, begin: int, parts: Collection[str] = ()) -> Iterator[ast.AST]:
    """Code after the line `begin` that uses what is not its own; `parts` may be used too."""
    own = {name for name, line in tops(tree) if line > begin} | {"Slice", "violation", *parts}
    alien = {name for name, line in tops(tree) if line <= begin}
    for top in tree.body:
        module = (top.module or "") if isinstance(top, ast.ImportFrom) else ""
        event = module.startswith("shoal.core.state.events.")  # a declaration, as those in `model`
        if module.startswith("shoal.core.") and isinstance(top, ast.ImportFrom) and not event:
            alien |= {alias.name for alias in top.names}
    for top in tree.body:
        for node in code_of(top) if top.lineno > begin else ():
            if isinstance(node, ast.Name) and node.id in alien - own:
                yield node
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name not in BUILTIN | (PLAIN if isinstance(node.func, ast.Attribute) else own):
                    yield node


def code_of(node: ast.AST) -> Iterator[ast.AST]:
    """All of it but the types."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST):
                    yield from code_of(inner)


# -- all of it -----------------------------------------------------------------------------


def test_every_module_begins_with_a_sentence_that_says_what_it_is_for() -> None:
    ends = (".", "!", "?", '"', "`", ")")
    assert [
        f"{name_of(path)}: {text!r}"
        for path in FILES
        if not (text := ast.get_docstring(tree_of(path)) or "").rstrip().endswith(ends)
    ] == []


def test_a_file_is_one_thought() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX} == {}


def test_a_function_fits_a_screen() -> None:
    def long(tree: ast.Module) -> Iterator[ast.AST]:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                # The options of a command are a table in its signature, which does not count.
                lines = (node.end_lineno or 0) - node.body[0].lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    yield node

    assert places(FILES, long) == []


def test_every_part_of_the_house_has_its_floor() -> None:
    """Else the import rules would not hold for it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    placed = {
        name.strip().removeprefix("shoal.")
        for contract in contracts
        for layer in contract.get("layers", [])
        for name in layer.split("|")
    }
    parts = {
        path.stem
        for path in SOURCE.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and path.stem != "__init__"
    }
    assert parts - placed == set()


# -- beside it -----------------------------------------------------------------------------


def imported(path: Path) -> set[str]:
    """The first parts of the names of all modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize(
    ("folder", "strangers"),
    [
        ("src", {"bench", "harness", "storm", "tests"}),
        ("storm", {"bench", "harness", "tests"}),
        ("harness", {"bench", "tests"}),
        ("bench", {"tests"}),
        ("tests", {"bench"}),
    ],
)
def test_tests_and_benchmarks_do_not_import_each_other(folder: str, strangers: set[str]) -> None:
    """What both need is in `harness`, which imports neither."""
    named = re.compile("|".join(sorted(strangers)))
    files = [one for one in sorted((ROOT / folder).rglob("*.py")) if named.search(one.read_text())]
    assert [f"{path}: {names}" for path in files if (names := imported(path) & strangers)] == []


def test_the_longest_files_are_where_the_list_says() -> None:
    assert [name for name in conftest.LONGEST if not (ROOT / name).exists()] == []
