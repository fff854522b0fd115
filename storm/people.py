"""An admin in the storm: adds, changes and removes tenants, users and tokens, and expects that what
was acknowledged holds, whatever crashes."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import msgspec

from shoal.model.identity import ApiKey, Role, Token, User
from shoal.model.report import (
    Accepted,
    AddTenant,
    Answer,
    EndSignIn,
    IdentityRequest,
    RemoveApiKey,
    RemoveTenant,
    RemoveToken,
    RemoveUser,
    SetApiKey,
    SetToken,
    SetUser,
)
from storm.lives import Untruth
from storm.world import World

ADMINS_PART = 0.25  # of the histories have an admin
# Jobs name the first two, too: a tenant with jobs cannot be removed.
TENANTS = ("red", "blue", "lab")
CHANGES_MAX = 25
ASK_AGAIN_MS = 1_500
ACCEPTS_PART = 0.5  # of the changes of a team that has an open invite
SIGNED_IN_MS = 7 * 86_400_000  # longer than a history


class Team(msgspec.Struct):
    """One tenant with one user and one token, as the admin believes it to be."""

    tenant: str
    user: str
    token: str
    added: bool = False
    role: Role | None = None
    known: bool = False  # the user exists, with that role or without any
    hash: str = ""  # of the token; empty: there is none
    invite: bool = False  # it is an invite that nobody has accepted
    key: str = ""  # the hash of its key for services
    out: str = ""  # the newest sign-in with the token that was ended; empty: there is none


class People:
    """One question per team at a time, repeated until it is answered."""

    def __init__(self, world: World, rng: random.Random, counts: Counter[str]) -> None:
        self.open_questions = 0
        self._world = world
        self._rng = rng
        self._counts = counts
        self._teams = [
            Team(tenant, f"{tenant}-user", f"token{number:04}")
            for number, tenant in enumerate(TENANTS)
        ]

    def plan(self, until_ms: int) -> None:
        if self._rng.random() > ADMINS_PART:
            return
        for team in self._teams:
            self._world.timeline.at(
                self._rng.randrange(until_ms),
                partial(self._change, team, self._rng.randrange(CHANGES_MAX)),
            )

    def verify(self) -> None:
        """Between two questions, the state is what the admin believes."""
        if not self._world.controller.readable or self.open_questions:
            return
        identity = self._world.controller.state.identity
        for team in self._teams:
            user, token = identity.users.get(team.user), identity.tokens.get(team.token)
            there = Team(
                tenant=team.tenant,
                user=team.user,
                token=team.token,
                added=team.tenant in identity.tenants,
                known=user is not None,
                role=user.roles.get(team.tenant) if user is not None else None,
                hash=token.hash if token is not None else "",
                invite=token is not None and token.invite,
                key=key.hash if (key := identity.api_keys.get(f"key{team.token}")) else "",
                out=team.out if identity.has_ended(team.token, team.out, SIGNED_IN_MS) else "",
            )
            if there != team:
                raise Untruth(f"an admin was told {team}, but there is {there}")

    def _change(self, team: Team, left: int) -> None:
        self.verify()
        if not left:
            return
        request = self._draw(team)
        self.open_questions += 1
        over = False

        def answered(answer: Answer) -> None:
            nonlocal over
            if over:
                return  # to the same question, asked before
            over = True
            self.open_questions -= 1
            kind = type(request).__name__
            self._counts[f"{kind} {'accepted' if isinstance(answer, Accepted) else 'refused'}"] += 1
            believe(team, request, answer)
            pause_ms = self._rng.randrange(1, 2_000)
            self._world.timeline.after(pause_ms, partial(self._change, team, left - 1))

        def ask() -> None:
            if not over:
                self._world.ask(request, answered)
                self._world.timeline.after(ASK_AGAIN_MS, ask)

        ask()

    def _draw(self, team: Team) -> IdentityRequest:
        rng = self._rng
        secret = f"{rng.getrandbits(256):064x}"
        role = rng.choice((Role.VIEWER, Role.VIEWER, Role.MEMBER))
        token = Token(id=team.token, user=team.user, tenant=team.tenant, role=role, hash=secret)
        user = User(name=team.user, roles={team.tenant: rng.choice((Role.VIEWER, Role.MEMBER))})
        until_ms = self._world.timeline.now_ms + SIGNED_IN_MS
        invite = msgspec.structs.replace(token, invite=True, until_ms=until_ms)
        if team.invite and rng.random() < ACCEPTS_PART:
            return SetToken(token, rotate=True, accepts=team.hash)
        key = ApiKey(id=f"key{team.token}", hash=secret, tenant=team.tenant, user=team.user)
        heir = rng.choice(("", *(other.user for other in self._teams)))
        requests: tuple[tuple[IdentityRequest, int], ...] = (
            (AddTenant(team.tenant), 4),
            (SetUser(user, add=True), 4),
            (SetUser(user), 3),
            (SetToken(token), 6),
            (SetToken(invite), 3),
            (SetToken(token, rotate=True), 2),
            (RemoveToken(team.token), 1),
            (RemoveUser(team.user, end=bool(rng.getrandbits(1)), heir=heir), 1),
            (RemoveTenant(team.tenant), 1),
            (EndSignIn(team.token, secret[:8], until_ms), 1),
            (SetApiKey(key), 2),
            (RemoveApiKey(key.id), 1),
        )
        weights = [weight for _, weight in requests]
        return rng.choices([request for request, _ in requests], weights)[0]


def believe(team: Team, request: IdentityRequest, answer: Answer) -> None:
    """A refusal may be the answer to the second of two equal questions, after the first was stored
    and its answer lost."""
    done = isinstance(answer, Accepted)
    gone = done or (not isinstance(answer, Accepted) and answer.missing)
    exists = not isinstance(answer, Accepted) and "already" in answer.message
    match request:
        case AddTenant():
            team.key = team.key if team.added else ""  # it was for what the operator had there
            team.added = done or exists
        case RemoveTenant() if gone:
            team.key = "" if team.added else team.key
            team.added, team.role, team.hash, team.out = False, None, "", ""
            team.invite = False
        case SetUser() if done or (exists and not team.known):
            team.known, team.role = True, request.user.roles[team.tenant]
        case RemoveUser() if gone:
            team.key = "" if team.known else team.key
            team.known, team.role, team.hash, team.out = False, None, "", ""
            team.invite = False
        case SetToken() if request.accepts:  # nobody else does: if it was refused, it was done
            team.hash, team.invite = request.token.hash, False
        case SetToken() if done or (exists and not team.hash):
            team.hash, team.invite = request.token.hash, request.token.invite
        case RemoveToken() if gone:
            team.hash, team.out, team.invite = "", "", False
        case SetApiKey() if done or (exists and not team.key):
            team.key = request.key.hash
        case RemoveApiKey() if gone:
            team.key = ""
        case EndSignIn() if team.hash:
            team.out = request.session
        case _:
            pass
