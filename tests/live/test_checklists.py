"""The checklists "Add a call", "Add a verb" and "Add a view" of docs/extending.md, done once: in a
copy of the house, each in two places, and everything else follows from them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.browser import Visit, chromium, missing
from harness.engines import On

ROOT = Path(__file__).parents[2]

# file -> (the line before, what is added after it); an empty line before: a new file
CALL = {
    "src/shoal/calls/cluster.py": (
        "class ClusterCalls(Calls):\n",
        '''    @call("GET", "/v1/greetings/{name}", Needs.READ, head=Head.ANY)
    def greeting(self, name: str, *, loud: bool = False) -> list[str]:
        """Greets somebody."""

''',
    ),
    "src/shoal/api/supply.py": (
        "class Supplies:\n",
        """    @handles(ClusterCalls.greeting)
    def greeting(self, name: str, loud: bool = False) -> list[str]:
        return ["Hello,", f"{name}{'!' if loud else '.'}"]

""",
    ),
}
VERB = {
    "src/shoal/cli/verbs/tenant.py": (
        "",
        '''

@verb(Argument("name", "NAME", "Whom to greet."))
def greet(name: str, json: bool, home: Path) -> None:
    """Greet somebody.

    Examples:
      shoal greet ann
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        words = client.greeting(name, loud=True)
    show.as_json(words) if json else show.line(" ".join(words))
''',
    ),
    "src/shoal/cli/first_page.py": (
        '    "People": {\n',
        '        "greet": ("tenant", "Greet somebody."),\n',
    ),
}
VIEW = {
    "src/shoal/web/view-greeting.js": (
        "",
        """// A greeting.
import { get } from "./api.js";
import { h } from "./dom.js";

export function mount(root, name) {
  const path = `/v1/greetings/${encodeURIComponent(name)}`;
  get(path).then((words) => root.append(h("h1", {}, words.join(" "))));
}
""",
    ),
    "src/shoal/web/views.js": (
        "export const VIEWS = {\n",
        '  greeting: { title: "Greeting", load: () => import("./view-greeting.js") },\n',
    ),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[On]:
    """Of the copy, with the three additions."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("src", "harness", "docs/reference"):
        shutil.copytree(ROOT / folder, copy / folder)  # with its bytecode
    for file, (before, added) in {**CALL, **VERB, **VIEW}.items():
        text = (copy / file).read_text() if (copy / file).exists() else ""
        assert before in text, f"{file} has changed: {before!r}"
        at = text.index(before) + len(before) if before else len(text)
        (copy / file).write_text(text[:at] + added + text[at:])
    on = On("local", copy)
    path = [str(copy / "src"), str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
    on.env = {"PYTHONPATH": os.pathsep.join(path)}
    python(on, "-m", "harness.generated")
    on.shoal("up", "--port", "0", "--nodes", "0")
    yield on
    on.shoal("down")


def python(on: On, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **on.env, "SHOAL_HOME": str(on.home)},
        cwd=on.scratch,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = """
import asyncio
import shoal
from shoal.calls.table import match

async def later():
    async with shoal.AsyncClient() as cluster:
        return await cluster.greeting("cy", loud=True)

with shoal.Client() as cluster:
    print(*cluster.greeting("ann"))
    schema = cluster.request("GET", "/schema/openapi.json", dict)
print(*asyncio.run(later()))
call, names = match("GET", "/v1/greetings/bob")
print(call.head.value, call.may.value, names["name"])
print(schema["paths"]["/v1/greetings/{name}"]["get"]["description"])
"""


def test_a_call_is_its_declaration_and_its_handler(cluster: On) -> None:
    lines = python(cluster, "-c", SCRIPT).splitlines()
    assert lines == ["Hello, ann.", "Hello, cy!", "any viewer bob", "Greets somebody."]
    reference = (cluster.scratch / "docs/reference/calls.md").read_text()
    entry = reference.partition("### GET /v1/greetings/{name}\n")[2].partition("###")[0]
    assert (
        "`greeting(name: str, *, loud: bool = False) -> list[str]` · viewer · answered by any"
        in entry
    )


def test_a_verb_is_a_function_and_a_line(cluster: On) -> None:
    assert cluster.shoal("greet", "ann") == "Hello, ann!\n"
    assert re.search(r"\n  greet +Greet somebody\.\n", cluster.shoal("help", "people"))
    reference = (cluster.scratch / "docs/reference/verbs.md").read_text()
    assert "### shoal greet\n" in reference


def test_a_view_is_a_file_and_a_line(cluster: On) -> None:
    if reason := missing():
        pytest.skip(reason)
    with chromium() as browser, cluster.client() as client:
        token = (cluster.home / "token").read_text().strip()
        visit = Visit(browser, client.url, token, width=1200, scheme="light")
        visit.sign_in()
        visit.go("greeting/ann")
        visit.page.get_by_role("heading", name="Hello, ann.").wait_for()
        visit.close()
