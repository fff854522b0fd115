"""What a starter reports when the node's last agent is gone and no other will be started."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import msgspec

from shoal.agent.dialling import problem_text, read_link_file
from shoal.link.channel import Refused, dial
from shoal.link.wire import Died, Link, LinkFile, ToAgent
from shoal.machine.exits import MEMBERS, read_exits
from shoal.machine.files import SPEC
from shoal.model.node import NodeSpec
from shoal.model.report import NodeGone

WITHIN_S = 15.0
PAUSE_S = 1.0


def report_death(directory: Path) -> str:
    """Empty if the head has heard it, or no longer knows this node; otherwise why not."""
    try:
        spec = msgspec.json.decode((directory / SPEC).read_bytes(), type=NodeSpec)
        incarnation = int((directory / "incarnation").read_text())
        file = read_link_file(directory)
    except FileNotFoundError:
        return "this node never ran"
    except (OSError, ValueError) as error:
        return str(error)
    why = "its agent has ended, and its processes with it"
    gone = NodeGone(spec.id, incarnation, why, read_exits(directory / MEMBERS))
    return asyncio.run(_send(file, Died(gone)))


async def _send(file: LinkFile, message: Died) -> str:
    """The head closes the link when it has heard the message."""
    problem, deadline = "no URL is known", time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        for url in file.ways:
            try:
                line = await dial(url, file, lambda: _link(message))
                async with asyncio.timeout(max(1.0, deadline - time.monotonic())):
                    await line.lost
                return ""
            except Refused:
                return ""
            except (OSError, TimeoutError) as error:
                problem = f"{url}: {problem_text(error)}"
        await asyncio.sleep(random.uniform(0, PAUSE_S))
    return problem


def _link(message: Died) -> Link:
    return Link(ToAgent, lambda link: link.send(message), lambda _: None, lambda _: None)
