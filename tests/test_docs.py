"""The documentation says what the code does, where a test can compare the two."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import click

from shoal.cli.app import shoal
from shoal.cli.first_page import VERBS

ROOT = Path(__file__).parent.parent
VARIABLE = re.compile(r"\bSHOAL_[A-Z0-9_]*[A-Z0-9]\b")


def test_every_variable_of_the_code_is_in_the_table_and_the_other_way_round() -> None:
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    used = set(VARIABLE.findall("\n".join(sources)))
    page = (ROOT / "docs" / "environment.md").read_text()
    product, _, testing = page.partition("Tests and benchmarks have")
    assert set(VARIABLE.findall(product)) == used
    checks = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    assert set(VARIABLE.findall(testing)) <= set(VARIABLE.findall("\n".join(checks)))


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_promise_of_the_readme_has_a_test_that_exists() -> None:
    """The lists of the first screen and of "What Shoal promises", and the page about them."""
    text = (ROOT / "README.md").read_text()
    first = text.partition("\nShoal is for")[0]
    bold = text.partition("## What Shoal promises")[2].partition("\n## ")[0]
    linked = re.findall(r"^- (.+?)\s+\(\[test\]\((\S+)\)\)$", first, re.MULTILINE | re.DOTALL)
    promises = [re.sub(r"\s+", " ", promise) for promise, _ in linked]
    assert len(promises) == len(re.findall("^- ", first, re.MULTILINE)) >= 6
    promises += re.findall(r"^- \*\*(.+?)\*\*", bold, re.MULTILINE)
    page = (ROOT / "docs" / "evidence.md").read_text()
    rows = [row.strip("| ").split(" | ") for row in page.splitlines() if row.startswith("| ")]
    tests = {cells[0]: re.findall(r"\[`(.+?)`\]\(\.\./(.+?)\)", cells[1]) for cells in rows}
    assert [promise for promise in promises if not tests.get(promise)] == []
    for promise, file in linked:
        assert file in {path for _, path in tests[re.sub(r"\s+", " ", promise)]}, promise
    for name, path in (test for row in tests.values() for test in row):
        if name != Path(path).name:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"


# -- commands ------------------------------------------------------------------------------

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(
    r"^(?:    |\$ |> )*(?:[A-Z_]+=\S+ |sudo )*(shoal [a-z].*)$|`(shoal [a-z][^`]*)`"
)
FILE = re.compile(r"[\w./-]+\.(?:py|yaml|toml|json|jsonl|csv|trace)\b")


def commands() -> list[tuple[str, list[str]]]:
    """Every command line with `shoal` in the pages: where it is, and its words before a comment."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        for line in text.splitlines():
            for match in COMMAND.finditer(line):
                words = (match[1] or match[2]).partition(" #")[0].split()
                found.append((f"{page.name}: {line.strip()[:100]}", words[1:]))
    return found


def own_words(words: list[str]) -> list[str]:
    """Those that shoal reads: not the command that a job runs, not what a pipe leads to."""
    ends = [at for at, word in enumerate(words) if word in ("--", "|", ">", "&&", ";", "<", "&")]
    return words[: min(ends, default=len(words))]


def test_commands_in_the_pages_have_verbs_and_flags_that_exist() -> None:
    wrong = []
    for where, words in commands():
        verb, *rest = own_words(words) or [""]
        verb = verb.rstrip(".,;:)")
        if verb not in VERBS:
            wrong.append(f"{where}: there is no verb {verb!r}")
            continue
        command = shoal.get_command(click.Context(shoal), verb)
        known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        valued = {
            name
            for one in command.params
            if isinstance(one, click.Option) and not one.is_flag
            for name in one.opts
        }
        for before, word in pairwise([verb, *rest]):
            if before in valued:
                continue
            flag = re.match(r"--?[a-zA-Z][a-z-]*", word.strip("[](){}'\"|"))
            if flag and flag[0] not in {*known, "--help", "-it"}:
                wrong.append(f"{where}: {verb} has no {flag[0]}")
    assert wrong == []


# Flags that pages name and that are not ours.
OF_OTHERS = {"--enable-metrics", "--executor", "--metrics", "--nnodes", "--nv", "--oversubscribe"}
OF_OTHERS |= {"--slurm-no-account", "--standalone"}
OF_BENCHMARKS = {
    "--bound",
    "--only",
    "--parts",
    "--quick",
    "--runs",
    "--seeds",
    "--ties",
    "--virtual",
}
PAGES_ABOUT_SLURM = {"slurm.md", "slurm-commands.md"}


def test_flags_that_pages_name_alone_exist() -> None:
    verbs = [shoal.get_command(click.Context(shoal), verb) for verb in VERBS]
    flags = [one for verb in verbs for one in verb.params]
    known = {name for one in flags for name in (*one.opts, *one.secondary_opts)}
    named = [
        (page.name, flag)
        for page in PAGES
        if page.name not in PAGES_ABOUT_SLURM
        for flag in re.findall(r"`(--[a-z][a-z-]*)(?:[ =][^`]*)?`", page.read_text())
    ]
    assert len(named) > 100, "they are found"
    allowed = known | OF_OTHERS | OF_BENCHMARKS
    assert [(page, flag) for page, flag in named if flag not in allowed] == []


def test_files_in_the_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    made = {"out.jsonl"}
    named = [
        name
        for line in text.splitlines()
        if line.startswith("    ")
        for name in FILE.findall(line.partition(" #")[0])
    ]
    assert named, "the commands are found"
    missing = [name for name in named if name not in made and not (ROOT / name).exists()]
    assert missing == []


def test_files_of_this_project_that_pages_name_exist() -> None:
    """In code, with a folder of ours before it: src/..., tests/..., docs/..., examples/..."""
    wrong = []
    for page in PAGES:
        for name in re.findall(
            r"`((?:src|tests|docs|examples|bench|harness|deploy)/[\w./-]*)", page.read_text()
        ):
            if not (ROOT / name.rstrip(".")).exists():
                wrong.append(f"{page.name}: {name}")
    assert wrong == []


# -- order ---------------------------------------------------------------------------------


def test_the_index_names_every_page_once() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    links = re.findall(r"\]\(([\w/.-]+\.md)\)", index)
    named = sorted(link for link in links if not link.startswith(("..", "adr/")))
    docs = ROOT / "docs"
    pages = {*docs.glob("*.md"), *docs.glob("reference/*.md")} - {docs / "README.md"}
    pages.add(docs / "gpu-results" / "README.md")  # which lists what is in that folder
    assert named == sorted(str(page.relative_to(docs)) for page in pages)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_decisions_have_a_status_and_the_list_has_all_of_them() -> None:
    folder = ROOT / "docs" / "adr"
    listed = (folder / "README.md").read_text()
    pages = sorted(folder.glob("[0-9]*.md"))
    for page in pages:
        title, _, status, *_ = page.read_text().splitlines()
        assert title.startswith(f"# {int(page.name[:4])}. "), page.name
        assert re.match(r"Status: (accepted|replaced by \[)", status), page.name
        assert f"]({page.name})" in listed, page.name
    gone = re.search(r"Numbers ([\d, toand]+) were reserved", listed)
    assert gone is not None
    spans = re.findall(r"(\d+)(?: to (\d+))?", gone[1])
    unused = {n for low, high in spans for n in range(int(low), int(high or low) + 1)}
    numbers = {int(page.name[:4]) for page in pages}
    assert sorted(numbers | unused) == list(range(1, max(numbers) + 1))
    assert not numbers & unused


def test_the_glossary_gives_each_word_one_meaning() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    words = [word.strip() for row in rows if row not in ("word", "---") for word in row.split(",")]
    assert sorted(words) == sorted(set(words))


# Words that read as translated, and British spellings. People see these strings.
BANNED = re.compile(
    r"\b(in vain|meanwhile|anew|for ever|allotted|nobody's|whilst|there is such|it was so"
    r"|has them so|is the most|as it was asked|wrong way round|falls asleep|done again"
    r"|nobody answers|no unknown process|costs no retry|restart rule is|submit it so|all about it"
    r"|\w*colour\w*|behaviours?|favour\w*|neighbour\w*|centred?|analys(e|ed|ing)|organis\w+"
    r"|serialis\w+|labell\w+|catalogue|licence|travell\w+|grey|artefacts?)\b",
    re.IGNORECASE,
)


def strings_of(path: Path) -> list[str]:
    """What a module prints: its strings, and the help pages of verbs, without other docstrings."""
    tree = ast.parse(path.read_text())
    silent = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            shown = any("verb" in ast.unparse(one) for one in getattr(node, "decorator_list", ()))
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and not shown:
                silent.add(first.value)
    texts = [one for one in ast.walk(tree) if isinstance(one, ast.Constant) and one not in silent]
    return [one.value for one in texts if isinstance(one.value, str) and " " in one.value]


def test_what_people_read_is_plain_american_english() -> None:
    wrong = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        if BANNED.search(path.read_text()):
            found = [match[0] for text in strings_of(path) for match in BANNED.finditer(text)]
            wrong += [f"{path.relative_to(ROOT)}: {word}" for word in found]
    for page in (ROOT / "README.md", ROOT / "docs/start.md", ROOT / "docs/page.md"):
        wrong += [f"{page.name}: {match[0]}" for match in BANNED.finditer(page.read_text())]
    assert wrong == []
