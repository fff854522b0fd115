"""Identity: tenants, users, tokens and sign-ins, and the keys of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import msgspec

from shoal.core.features.schedules import (
    drop_schedules,
    hand_schedules,
    pause_schedules,
    schedules_of,
)
from shoal.core.state.events.identity import (
    KeyRemoved,
    KeySet,
    SignInEnded,
    TenantAdded,
    TenantRemoved,
    TokenRemoved,
    TokenSet,
    UserRemoved,
    UserSet,
)
from shoal.core.state.round import Round
from shoal.core.state.state import Node, State
from shoal.model.identity import (
    EVERY_TENANT,
    INVITE_MS_MAX,
    INVITES_MAX,
    JOIN_TOKENS_MAX,
    KEYS_MAX,
    OPERATOR,
    REMOVED_MAX,
    TENANT_UIDS,
    TENANTS_MAX,
    TOKENS_MAX,
    TOKENS_PER_USER_MAX,
    USERS_MAX,
    Identity,
    Role,
    TenantRecord,
    Token,
    User,
    order_key_id,
    role_in,
)
from shoal.model.job import DEFAULT_TENANT
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.report import (
    Accepted,
    AddTenant,
    Answer,
    EndSignIn,
    PeopleRequest,
    Refused,
    RemoveKey,
    RemoveTenant,
    RemoveToken,
    RemoveUser,
    SetKey,
    SetToken,
    SetUser,
)
from shoal.model.supply import ORDERS_MAX


def change_identity(round_: Round, request: PeopleRequest) -> Answer:
    match request:
        case AddTenant():
            return _add_tenant(round_, request)
        case RemoveTenant():
            return _remove_tenant(round_, request)
        case SetUser():
            return _set_user(round_, request)
        case RemoveUser():
            return _remove_user(round_, request)
        case SetToken():
            return _set_token(round_, request)
        case RemoveToken():
            return _remove_token(round_, request)
        case EndSignIn():
            return _end_sign_in(round_, request)


def _add_tenant(round_: Round, request: AddTenant) -> Answer:
    known = round_.state.identity.tenants
    if request.tenant in (DEFAULT_TENANT, EVERY_TENANT):
        return Refused("tenant", f"{request.tenant!r} is the operator's own; choose another name")
    if request.tenant in known:
        return Refused("tenant", f"there is a tenant {request.tenant} already")
    if len(known) >= TENANTS_MAX:
        return Refused("tenant", f"there are {TENANTS_MAX} tenants, the maximum; remove one")
    owners = {record.uid: record.name for record in known.values()}
    if request.uid in owners:
        return Refused("uid", f"{request.uid} is the Unix user of {owners[request.uid]}")
    uid = request.uid or free_uid(round_.state.identity)
    if not uid:
        span = f"{TENANT_UIDS.start} to {TENANT_UIDS.stop - 1}"
        return Refused("uid", f"{span} were all given out; name another, e.g. --uid 70000")
    record = _new_record(round_, request.tenant, uid)
    round_.emit(TenantAdded(at_ms=round_.now_ms, tenant=record, who=request.who))
    return Accepted(record.name)


def _new_record(round_: Round, name: str, uid: int) -> TenantRecord:
    """Nothing of an earlier tenant of this name is the new one's (ADR 87)."""
    state = round_.state
    before_ms = state.identity.removed.get(name)
    # Names that were forgotten may have been anybody's.
    fresh = before_ms is None and len(state.identity.removed) < REMOVED_MAX
    since_ms = max(round_.now_ms, (before_ms or 0) + 1)  # clocks are set back
    first_job = 0 if fresh else state.next_job
    return TenantRecord(name=name, uid=uid, since_ms=since_ms, first_job=first_job)


def free_uid(identity: Identity) -> int:
    """One that was never given out: the files of a tenant that was removed must not become
    another's. 0: there is none."""
    owned = {*identity.spent, *(record.uid for record in identity.tenants.values())}
    later = range(identity.next_uid, TENANT_UIDS.stop)
    return next((uid for uid in (*later, *TENANT_UIDS) if uid not in owned), 0)


def _remove_tenant(round_: Round, request: RemoveTenant) -> Answer:
    """Not while something of it is left: without its record, its jobs would run as the agent."""
    state = round_.state
    if request.tenant not in state.identity.tenants:
        return _no("tenant", request.tenant)
    for service in state.services.values():
        if service.spec.replica.tenant == request.tenant:
            stop = f"shoal service {service.spec.name} --stop"
            return Refused("tenant", f"has a service; end it first, with: {stop}")
    for job in (*state.arrays.values(), *state.jobs.values()):
        if job.spec.tenant == request.tenant:
            return Refused("tenant", f"has the job {job.id}; cancel it, or wait for its end")
    drop_schedules(round_, request.tenant)
    round_.emit(TenantRemoved(at_ms=round_.now_ms, tenant=request.tenant, who=request.who))
    return Accepted(request.tenant)


def _set_user(round_: Round, request: SetUser) -> Answer:
    identity, user = round_.state.identity, request.user
    before = identity.users.get(user.name)
    if user.name == OPERATOR:
        return Refused("user", "is the person who started the cluster; choose another name")
    if before is not None and request.add:
        return Refused("user", f"there is a user {user.name} already")
    if before is None and not request.add:
        return _no("user", user.name)
    if before is None and len(identity.users) >= USERS_MAX:
        return Refused("user", f"there are {USERS_MAX} users, the maximum; remove one")
    problem = _role_problem(round_, user)
    if problem is not None:
        return problem
    if before is not None and user.subject not in ("", before.subject):
        return Refused("user", f"{user.name} is somebody else; ask an admin for another name")
    since_ms = before.since_ms if before is not None else round_.now_ms
    subject = before.subject if before is not None else user.subject
    user = msgspec.structs.replace(user, since_ms=since_ms, subject=subject)
    if user != before:
        round_.emit(UserSet(at_ms=round_.now_ms, user=user, who=request.who))
    return Accepted(user.name)


def _role_problem(round_: Round, user: User) -> Refused | None:
    for tenant, role in user.roles.items():
        if role is Role.ADMIN and tenant != EVERY_TENANT:
            return Refused("role", "an admin is one for every tenant: leave the tenant out")
        if role is Role.MEMBER and tenant == EVERY_TENANT:
            return Refused("role", "a member belongs to a tenant; name it, e.g. --tenant lab")
        if tenant != EVERY_TENANT and tenant not in round_.state.identity.tenants:
            return _no("tenant", tenant)
    return None


def _remove_user(round_: Round, request: RemoveUser) -> Answer:
    if request.user not in round_.state.identity.users:
        return _no("user", request.user)
    if request.heir and (problem := _hand_over(round_, request)):
        return problem
    pause_schedules(round_, request.user)
    round_.emit(UserRemoved(at_ms=round_.now_ms, user=request.user, who=request.who))
    return Accepted(request.user)


def _hand_over(round_: Round, request: RemoveUser) -> Refused | None:
    """Schedules of which the heir can be the owner, or none."""
    heir = round_.state.identity.users.get(request.heir)
    if heir is None or heir.name == request.user:
        return Refused("heir", f"there is no other user {request.heir}; see: shoal user list")
    for tenant in sorted(schedules_of(round_.state, request.user)):
        role = role_in(heir, tenant)
        if role is None or role.rank < Role.MEMBER.rank:
            message = f"{heir.name} is not a member of {tenant}, so cannot take over its schedules"
            return Refused("heir", message)
    hand_schedules(round_, request.user, heir.name)
    return None


def _set_token(round_: Round, request: SetToken) -> Answer:
    identity, token = round_.state.identity, request.token
    before = identity.tokens.get(token.id)
    if request.rotate:
        if before is None:
            return _no("token", token.id)
        if problem := _invite_problem(round_, before, request.accepts):
            return problem
        token = msgspec.structs.replace(
            before, hash=token.hash, until_ms=token.until_ms, invite=False
        )
    else:
        if before is not None:
            return Refused("token", f"there is a token {token.id} already")
        user = identity.users.get(token.user)
        if user is None:
            return _no("user", token.user)
        role = role_in(user, token.tenant)
        if token.only and (token.tenant == EVERY_TENANT or token.role is Role.ADMIN):
            return Refused("only", "a token for a neighbor acts for one tenant; name it")
        if role is None or role.rank < token.role.rank:
            has = f"is {role.value}" if role else "has no role"
            where = "every tenant" if token.tenant == EVERY_TENANT else token.tenant
            return Refused("role", f"{user.name} {has} in {where}, so not {token.role.value}")
        _drop_expired(round_, user.name)
        own = sum(other.user == user.name for other in identity.tokens.values())
        if own >= TOKENS_PER_USER_MAX or len(identity.tokens) >= TOKENS_MAX:
            return Refused("token", f"{user.name} has {own} tokens; remove one that is not in use")
        if token.invite and (problem := _new_invite_problem(round_, token)):
            return problem
        token = msgspec.structs.replace(token, since_ms=round_.now_ms)
    if token.until_ms and token.until_ms <= round_.now_ms:
        return Refused("expires", "is in the past; say when it ends, e.g. --expires 30d")
    round_.emit(TokenSet(at_ms=round_.now_ms, token=token, who=request.who))
    return Accepted(token.id)


def _invite_problem(round_: Round, before: Token, accepts: str) -> Refused | None:
    """Of two who accept the same invite, the second finds that it is none any more."""
    if not accepts:
        message = f"{before.id} is an invite; remove it, and invite {before.user} again"
        return Refused("token", message) if before.invite else None
    open_ = before.invite and before.hash == accepts and before.until_ms > round_.now_ms
    return None if open_ else _no("token", before.id)


def _new_invite_problem(round_: Round, token: Token) -> Refused | None:
    if not 0 < token.until_ms - round_.now_ms <= INVITE_MS_MAX:
        return Refused("expires", "an invite ends within 7 days; say when, e.g. --expires 3d")
    tokens = round_.state.identity.tokens.values()
    count = sum(one.invite and one.until_ms > round_.now_ms for one in tokens)
    if count < INVITES_MAX:
        return None
    return Refused("token", f"{INVITES_MAX} invites are open, the maximum; remove one")


def _drop_expired(round_: Round, user: str) -> None:
    """Whoever signs in every day would run into the bound."""
    for token in list(round_.state.identity.tokens.values()):
        if token.user == user and 0 < token.until_ms <= round_.now_ms:
            who = "shoal, because it has expired"
            round_.emit(TokenRemoved(at_ms=round_.now_ms, token=token.id, who=who))


def _remove_token(round_: Round, request: RemoveToken) -> Answer:
    if request.token not in round_.state.identity.tokens:
        return _no("token", request.token)
    round_.emit(TokenRemoved(at_ms=round_.now_ms, token=request.token, who=request.who))
    return Accepted(request.token)


def _end_sign_in(round_: Round, request: EndSignIn) -> Answer:
    """One that is over anyway needs no fact."""
    identity, until_ms = round_.state.identity, request.until_ms
    known = not request.token or request.token in identity.tokens
    if (
        known
        and until_ms > round_.now_ms
        and not identity.has_ended(request.token, request.session, until_ms)
    ):
        round_.emit(
            SignInEnded(
                at_ms=round_.now_ms,
                token=request.token,
                session=request.session,
                until_ms=until_ms,
                who=request.who,
            )
        )
    return Accepted("")


def _no(field: str, name: str) -> Refused:
    return Refused(field, f"there is no {field} {name}; see: shoal {field} list", missing=True)


def change_keys(round_: Round, request: SetKey | RemoveKey) -> Answer:
    match request:
        case SetKey():
            return _set_key(round_, request)
        case RemoveKey():
            return _remove_key(round_, request)


def void_keys(round_: Round, node: Node) -> None:
    """A node that was removed and is gone does not come back with its old key. While it is still
    there it keeps the key, because it has to hear that it is dismissed."""
    if node.intent is NodeIntent.REMOVED and node.health is NodeHealth.LOST:
        _void(round_, node.id, f"{node.id} is no longer part of the cluster")


def _set_key(round_: Round, request: SetKey) -> Answer:
    identity, key = round_.state.identity, request.key
    if key.until_ms and key.until_ms <= round_.now_ms:
        return Refused("expires", "is in the past; say when it ends, e.g. --expires 30d")
    before = identity.keys.get(key.id)
    if before is not None and (key.node or before.node):
        return Refused("key", f"there is a key {key.id} already")
    if (key.order or request.order) and (over := _order_over(round_, request)):
        return over
    if key.node:
        taken = _taken(round_, request)
        if taken is not None:
            return taken
        _void(round_, key.node, f"{key.node} joined again, and has another key")
        _void_unused(round_)
        most, what = KEYS_MAX, "keys of nodes"
    elif key.order:
        most, what = ORDERS_MAX, "tokens of orders"
    else:
        most, what = JOIN_TOKENS_MAX, "join tokens"
    sort = (bool(key.node), bool(key.order))
    alike = sum((bool(one.node), bool(one.order)) == sort for one in identity.keys.values())
    if before is None and alike >= most:
        return Refused("key", f"there are {most} {what}, the maximum; remove one")
    key = msgspec.structs.replace(key, since_ms=round_.now_ms)
    round_.emit(KeySet(at_ms=round_.now_ms, key=key, who=request.who))
    return Accepted(key.id)


def _order_over(round_: Round, request: SetKey) -> Refused | None:
    """A join token of an order lets in each node of that order until it has come. Jobs run on a
    node only after that, so whatever they read there is of no use to them."""
    order_id, node = request.key.order or request.order, request.key.node
    order = round_.state.orders.get(order_id)
    if order is None or order.release:
        return Refused("token", f"is of order {order_id}, which is over")
    if node and node not in order.nodes:
        return Refused("name", f"{node} is not a node of order {order_id}")
    if node in round_.state.brought.get(order_id, ()):
        return Refused("token", f"was used: {node} has joined with it")
    return None


def void_order_key(round_: Round, order: str, nodes: Collection[str]) -> None:
    """When all nodes of an order have come, nobody needs its token."""
    key_id = order_key_id(order)
    if key_id in round_.state.identity.keys and len(round_.state.brought.get(order, ())) == len(
        nodes
    ):
        why = "all nodes of the order have joined"
        round_.emit(KeyRemoved(at_ms=round_.now_ms, key=key_id, why=why))


def _void_unused(round_: Round) -> None:
    """Whoever has the join token could use up all keys with names that never come."""
    identity, nodes = round_.state.identity, round_.state.nodes
    known = [key for key in identity.keys.values() if key.node]
    if len(known) >= KEYS_MAX:
        unused = next((key for key in known if key.node not in nodes), None)
        if unused is not None:
            _void(round_, unused.node, f"{unused.node} never came, and keys are used up")


def _taken(round_: Round, request: SetKey) -> Refused | None:
    """Never two nodes under one name: another machine may take it only when its node is gone."""
    state, key = round_.state, request.key
    node = state.nodes.get(key.node)
    if node is None or (node.intent is NodeIntent.REMOVED and node.health is NodeHealth.LOST):
        return None
    own = {known.id for known in state.identity.keys_of(key.node)}
    # A life's number shows nothing while there is a key: two machines that start in the same second
    # have the same one. If the key was removed, its agent may have begun a life unheard of since.
    same = request.before in own or (not own and request.incarnation >= node.incarnation)
    if not node.spec.origin:
        where = "one of the head's own nodes"
    elif same or node.health is NodeHealth.LOST:
        return None
    else:
        where = f"the machine at {node.spec.address}"
    return Refused("name", f"{key.node} is taken by {where}; choose another with --name")


def _remove_key(round_: Round, request: RemoveKey) -> Answer:
    if request.key not in round_.state.identity.keys:
        message = f"there is no key {request.key}; see: shoal token list"
        return Refused("key", message, missing=True)
    round_.emit(KeyRemoved(at_ms=round_.now_ms, key=request.key, who=request.who))
    return Accepted(request.key)


def _void(round_: Round, node: str, why: str) -> None:
    for key in round_.state.identity.keys_of(node):
        round_.emit(KeyRemoved(at_ms=round_.now_ms, key=key.id, why=why))


# -- what always holds, in code that shares nothing with the code above ----------------------------


def identity_violation(state: State) -> str:
    """What is gone leaves nothing behind that could come to life with a new one of its name."""
    identity = state.identity
    if len({record.uid for record in identity.tenants.values()}) != len(identity.tenants):
        return "two tenants have the same Unix user"
    for user in identity.users.values():
        if missing := set(user.roles) - {*identity.tenants, "*"}:
            return f"{user.name} has a role in {sorted(missing)[0]}, which does not exist"
    for token in identity.tokens.values():
        if token.invite and not token.until_ms:
            return f"the invite {token.id} does not expire"
        if token.user not in identity.users or token.tenant not in (*identity.tenants, "*"):
            return f"the token {token.id} has outlived its user or its tenant"
        if token.only and token.tenant == "*":
            return f"the token {token.id} of a neighbor is for every tenant"
    if both := sorted(set(identity.tenants) & set(identity.removed)):
        return f"the tenant {both[0]} is there, and was removed"
    for record in identity.tenants.values():
        if record.first_job > state.next_job:
            return f"the jobs of {record.name} begin after the newest one"
    if gone := set(identity.ended) - {*identity.tokens, ""}:
        return f"sign-ins of the token {sorted(gone)[0]} have outlived it"
    stale = [key.order for key in identity.keys.values() if key.order not in ("", *state.orders)]
    if stale:
        return f"the join token of order {stale[0]} has outlived it"
    named = Counter(key.node for key in identity.keys.values() if key.node)
    if twice := [node for node, count in named.items() if count > 1]:
        return f"{twice[0]} has two keys"
    return ""
