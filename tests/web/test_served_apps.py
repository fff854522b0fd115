"""Apps of others in a browser, through the gateway: Gradio, and FastAPI's page of its API."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from harness.waiting import until

from shoal.client import ShoalError
from shoal.forms.request import SERVICE
from shoal.gateway.binary import GatewayError, find_binary
from tests.live.cluster import Live
from tests.needs import need

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

READY_S = 120
FASTAPI = """
from fastapi import FastAPI

app = FastAPI(title="Fish")

@app.get("/fish")
def fish() -> str:
    return "trout"
"""
GRADIO = """
import os
import gradio

page = gradio.Interface(lambda name: "Hello " + name, "text", "text", api_name="greet")
page.launch(server_port=int(os.environ["PORT"]))
"""
# Swagger's own files come from elsewhere, where tests do not go; what they ask for is what counts.
SWAGGER = """
window.SwaggerUIBundle = Object.assign(
  (given) => fetch(given.url).then(async (answer) => {
    document.body.innerText = answer.status + " " + (await answer.text());
  }),
  { presets: { apis: [] }, SwaggerUIStandalonePreset: [] },
);
"""


@pytest.fixture
def serve(live: Live, tmp_path: Path) -> Iterator[Any]:
    try:
        find_binary()
    except GatewayError as error:
        pytest.skip(str(error))
    names = []

    def put(name: str, code: str, *command: str, **fields: Any) -> Any:
        (tmp_path / "app.py").write_text(code)
        written = {"name": name, "command": list(command), "workdir": str(tmp_path), **fields}
        live.client.submit_service(SERVICE.make(written))
        names.append(name)
        ready = lambda: live.client.service(name).state == "ready"  # noqa: E731
        until(ready, more=lambda: live.client.service(name))
        return live.client.service(name)

    yield put
    for name in names:
        with contextlib.suppress(ShoalError):
            live.client.stop_service(name)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


@pytest.mark.parametrize("path", ["", "/of/fish"])
def test_the_api_page_of_fastapi_finds_its_description(serve: Any, page: Page, path: str) -> None:
    need("fastapi")
    need("uvicorn")
    words = f"exec {sys.executable} -m uvicorn app:app --port $PORT"
    view = serve(f"fish{len(path)}", FASTAPI, "sh", "-c", words, **({"path": path} if path else {}))
    page.route("**/*swagger-ui-bundle.js", lambda route: route.fulfill(body=SWAGGER))
    page.route("**/*swagger-ui.css", lambda route: route.fulfill(body=""))
    page.route("**/favicon*", lambda route: route.fulfill(body=""))
    page.goto(view.browser_url + "docs")
    page.get_by_text("/fish").wait_for()
    said = page.inner_text("body")
    assert said.startswith("200 ") and '"title":"Fish"' in said
    answer = page.goto(view.browser_url + "fish")
    assert answer is not None and answer.text() == '"trout"'


@pytest.mark.parametrize("path", ["", "/of/greeter"])
def test_a_gradio_app_works(serve: Any, page: Page, path: str) -> None:
    need("gradio")
    fields = {"path": path} if path else {}
    env = {"GRADIO_ANALYTICS_ENABLED": "False", "HOME": "."}
    view = serve(f"greeter{len(path)}", GRADIO, sys.executable, "app.py", env=env, **fields)
    failed: list[str] = []
    local = view.browser_url.partition("/")[2].strip("/").partition("/")[0]

    def note(url: str, status: int) -> None:
        if local in url and status >= 400:
            failed.append(f"{status} {url}")

    page.on("response", lambda one: note(one.url, one.status))
    page.route(lambda url: local not in url, lambda route: route.abort())
    page.goto(view.browser_url)
    page.get_by_label("name").fill("trout")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('textarea')].some(t => t.value === 'Hello trout')"
    )
    assert failed == []
