"""Tries a policy out in a separate process: users' functions may hang, exit or eat memory."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from shoal.control import plugins
from shoal.core import tryout
from shoal.core.state import image
from shoal.core.state.state import State
from shoal.model.policy import Policy

TRYOUT_S_MAX = 60.0  # it takes half a second on an idle machine


class Trial(msgspec.Struct, frozen=True):
    """The input of the process; it answers with the problem, or with nothing."""

    policy: Policy
    image: bytes
    now_ms: int


async def problem(policy: Policy, state: State, now_ms: int) -> str | None:
    """Why this policy cannot be obeyed, as `field: sentence`."""
    trial = Trial(policy, image.encoded(state.snapshot()), now_ms)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "shoal.control.tryout",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(TRYOUT_S_MAX):
            said, _ = await process.communicate(msgspec.msgpack.encode(trial))
    except TimeoutError:
        return f"policy: it was tried out for {TRYOUT_S_MAX:g} s and did not finish"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    answer = said.splitlines()
    if process.returncode or not answer:  # a user's function may end the process, with any code
        return f"policy: the process that tried it out ended with {process.returncode}"
    # Users' modules may print; the answer is the last line.
    return msgspec.json.decode(answer[-1], type=str) or None


def main() -> None:
    trial = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Trial)
    found = plugins.problem(trial.policy)
    found = found or _failure(trial) or ""
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(found) + b"\n")


def _failure(trial: Trial) -> str | None:
    functions = plugins.PolicyFunctions().load(trial.policy)
    return tryout.problem(trial.policy, functions, trial.image, trial.now_ms)


if __name__ == "__main__":
    main()
