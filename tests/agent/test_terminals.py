"""The terminal of an interactive member."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from shoal.agent.process import Console


def test_a_member_that_opens_its_terminal_late_is_heard(tmp_path: Path) -> None:
    async def story() -> bytes:
        output = os.open(tmp_path / "output", os.O_RDWR | os.O_CREAT)
        console = Console(output)
        name = os.ttyname(console.ends.input)
        console.begin()
        for _ in range(10):  # the loop looks at the terminal while the member has not opened it
            await asyncio.sleep(0)
        member = os.open(name, os.O_RDWR | os.O_NOCTTY)
        os.write(member, b"hello")
        _, data = await asyncio.wait_for(console.after(0), 30)
        os.write(member, b", the end")
        os.close(member)
        console.end(0)
        os.close(output)
        return data

    assert asyncio.run(story()) == b"hello"
    assert (tmp_path / "output").read_bytes() == b"hello, the end"
