"""What happened to tenants, users, tokens and keys, as sentences."""

from __future__ import annotations

from shoal.model.events import (
    IdentityEvent,
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


def about_identity(event: IdentityEvent) -> str:
    by = f" by {event.who}" if event.who else ""
    match event:
        case TenantAdded():
            return f"tenant {event.tenant.name} was added{by} (Unix user {event.tenant.uid})"
        case TenantRemoved():
            return f"tenant {event.tenant} was removed{by}"
        case UserSet():
            roles = ", ".join(f"{role} of {name}" for name, role in event.user.roles.items())
            shown = roles.replace("*", "every tenant") or "no role"
            return f"user {event.user.name} was set{by}: {shown}"
        case UserRemoved():
            return f"user {event.user} was removed{by}"
        case TokenSet():
            return f"token {event.token.id} of {event.token.user} was set{by}"
        case TokenRemoved():
            return f"token {event.token} was removed{by}"
        case SignInEnded():
            whose = f"with token {event.token}" if event.token else "of the operator"
            return f"a sign-in {whose} was ended{by}"
        case KeySet():
            what = f"the key of {event.key.node}" if event.key.node else "a join token"
            return f"{what} was set{by} ({event.key.id})"
        case KeyRemoved():
            return f"key {event.key} was removed{by}{f': {event.why}' if event.why else ''}"
        case _:
            raise TypeError(f"no words for {type(event).__name__}")
