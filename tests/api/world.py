"""Two tenants on one cluster: what one of them has is marked, so that any leak can be found."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from harness.waiting import until

from shoal.api.access import new_token
from shoal.model.identity import EVERY_TENANT, Role, Token, User
from shoal.model.job import MemberRef, Phase
from shoal.model.policy import Policy, Tenant
from shoal.model.report import LogChunk, RemoveToken, SetToken, SetUser
from tests.api.server import OPERATORS, Server

OURS, THEIRS = "ours", "zebratenant"
MARK = b"zebra"  # in everything that is theirs
LOG = b"zebralog 4711 of the other tenant\n"
PACKAGE, OUR_PACKAGE = b"zebrapackage", b"our package"
POLICY = Policy(
    run_ms_min=0,
    silent_after_ms=3_600_000,  # the clock is moved by hand
    reservations=0,  # small jobs start beside one that waits for the whole node
    tenants=(
        Tenant(name=OURS, budget_gpu_hours=100),
        Tenant(name=THEIRS, quota_gpus=2, budget_gpu_hours=100),
    ),
)
Result = TypeVar("Result")


class World:
    """`ours` and `theirs` hold the ids of what each tenant has."""

    def __init__(self, server: Server) -> None:
        self.server = server
        for tenant in (OURS, THEIRS):
            server.tenant(tenant)
        self.tokens = {
            "operator": OPERATORS,
            "member": server.token("anna", OURS),
            "viewer": server.token("vera", OURS, Role.VIEWER),
            "viewer of all": server.token("otto", EVERY_TENANT, Role.VIEWER),
            "admin": server.token("ada", EVERY_TENANT, Role.ADMIN),
            "them": server.token("zebrauser", THEIRS),
            "nobody": "",
            "wrong": "shoal_00000000_wrong",
            "revoked": server.token("ruth", OURS),
            "expired": self._expiring(),
        }
        server.ask(RemoveToken(self.tokens["revoked"].split("_")[1]))
        self.ours = self._fill("member", "our", OUR_PACKAGE)
        self.theirs = self._fill("them", "zebra", PACKAGE)
        self._preempt()
        server.loop.clock.ms += 10_000  # type: ignore[attr-defined]

    def _expiring(self) -> str:
        token_id, token, hash_ = new_token()
        now_ms = self.server.loop.clock.now_ms()
        self.server.ask(SetUser(User(name="erik", roles={OURS: Role.MEMBER}), add=True))
        self.server.ask(
            SetToken(
                Token(
                    id=token_id,
                    user="erik",
                    tenant=OURS,
                    role=Role.MEMBER,
                    hash=hash_,
                    until_ms=now_ms + 5_000,
                )
            )
        )
        return token

    def _fill(self, who: str, prefix: str, package: bytes) -> dict[str, str]:
        ids = {"package": hashlib.sha256(package).hexdigest()}
        self.ask(who, "PUT", f"/v1/packages/{ids['package']}", package)
        self.ask(who, "PUT", f"/v1/secrets/{prefix}secret", f"{prefix}value".encode())
        ids["secret"] = f"{prefix}secret"
        rule = {"wish": f"failed=https://{prefix}.example.com/{prefix}hook"}
        ids["rule"] = str(self.ask(who, "POST", "/v1/rules", rule)["id"])
        ids["done"] = self.submit(who, f"{prefix}done", package=ids["package"])
        self.until(ids["done"], Phase.RUNNING)
        self.on_loop(lambda: self._end(ids["done"]))
        self.until(ids["done"], None)
        ids["job"] = self.submit(who, f"{prefix}job")
        self.until(ids["job"], Phase.RUNNING)
        log = LOG if prefix == "zebra" else b"our log\n"
        self.on_loop(lambda: self.server.loop.log(LogChunk(MemberRef(ids["job"], 1, 0), 0, log)))
        ids["service"] = f"{prefix}service"
        replica = {"command": [f"{prefix}serve"], "cpu_milli": 100}
        body = {"name": ids["service"], "replica": replica}
        self.ask(who, "PUT", f"/v1/services/{ids['service']}", body)
        made = self.ask(who, "POST", "/v1/tokens", {"note": f"{prefix}note"})
        ids["token"] = made["token"]["id"]
        wanted = {"services": [ids["service"]], "user": f"{prefix}app"}
        ids["api_key"] = self.ask(who, "POST", "/v1/api-keys", wanted)["key"]["id"]
        return ids

    def _preempt(self) -> None:
        """Their job takes our job's GPUs, so that ours has every reason to name theirs."""
        mine = self.submit("member", "ourwaiting", gpus=4, preemptible=True)
        self.until(mine, Phase.RUNNING)
        theirs = self.submit("them", "zebratakes", gpus=3, priority=100)
        self.until(mine, Phase.STOPPING)
        self.on_loop(lambda: self._end(mine, 143))
        self.until(theirs, Phase.RUNNING)
        self.ours["waiting"], self.theirs["waiting"] = mine, theirs

    def submit(self, who: str, name: str, **fields: Any) -> str:
        spec = {
            "command": [f"{name}command"],
            "name": name,
            "env": {"SOMETHING": f"{name}env"},
            "cpu_milli": 100,
            **fields,
        }
        return str(self.ask(who, "POST", "/v1/jobs", {"spec": spec})["id"])

    def ask(self, who: str, method: str, path: str, body: Any = None) -> Any:
        reply = self.server.call(self.tokens[who], method, path, body)
        assert reply.status in (200, 201), (path, reply)
        return msgspec.json.decode(reply.body)

    def until(self, job: str, phase: Phase | None) -> None:
        """The job has this phase; None: it has finished."""

        def reached() -> bool:
            known = self.server.loop.tick.state.jobs.get(job)
            return (known.phase if known else None) is phase

        until(reached, f"{job} is not {phase}")

    def leaks(self, data: bytes, asked: str = "") -> bool:
        """Whether something of theirs is in it, apart from what was asked for by name: a word of
        theirs, their log, or the id of one of their jobs."""
        left = data.replace(asked.encode(), b"") if asked else data
        live = self.server.loop.tick.state.jobs.values()
        ids = {self.theirs["done"], *(job.id for job in live if job.spec.tenant == THEIRS)}
        words = (*ids, base64.b64encode(LOG).decode()[:24], self.theirs["package"])
        found = re.search(rb"\b(%s)\b" % b"|".join(map(str.encode, sorted(words))), left)
        return MARK in left.lower() or found is not None

    def on_loop(self, work: Callable[[], Result]) -> Result:
        async def run() -> Result:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.server.asyncio).result(120)

    def _end(self, job: str, code: int = 0) -> None:
        engine = self.server.engine
        engine.book.exited(MemberRef(job, 1, 0), code)
        engine.inbox.heard(engine.book.report())
