"""Reaching a cluster from any machine: login, logout, context, page and completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import CHOSEN, CONTEXT_NAME, Argument, Option, flag, verb
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.client.contexts import Chosen, Context
    from shoal.client.transport import Endpoint


TOKEN_BYTES_MAX = 4096


@verb(
    Argument("url", "[URL,...]", "The head's address, e.g. https://head:7700.", required=False),
    Option("--fingerprint", metavar="F", help="The fingerprint that the head shows."),
    Option("--token-file", metavar="FILE", type=Path, help="File with your token; - is stdin."),
    flag("--oidc", help="Sign in through your organization, in a browser on any machine."),
    Option("--tenant", "-t", metavar="NAME", default="", help="With --oidc: which of yours."),
    flag("--show", help="On the head: print the line for other machines."),
)
def login(
    url: str | None,
    fingerprint: str | None,
    token_file: Path | None,
    oidc: bool,
    tenant: str,
    show: bool,
    json: bool,
    home: Path,
) -> None:
    """Log in to a cluster on another machine.

    `shoal up --host ADDRESS` prints the whole line, with the fingerprint of the
    cluster's certificate; `shoal login --show` prints it again. If the certificate
    is not one that this system trusts anyway, the fingerprint decides: a head
    with another one is refused. Without --fingerprint you are asked to compare.

    The token is asked for, read from --token-file, or read from stdin. An admin
    makes one with `shoal token add`; the operator's own is the file token in the
    head's home. The code of an invite is taken, too: it becomes your token.

    With --oidc it prints an address and a code instead. You open the address in a
    browser anywhere and enter the code; the sign-in lasts 8 hours.

    The cluster is kept as a context, and commands use it from then on. Its name
    is the first part of the host's name, or what --context says. Without URL you
    log in again to a context that you have, for example with a new token.

    A cluster with several heads may be named by any of them. Name two, with a
    comma, if one may be down now; the cluster itself names the rest.

    Examples:
      shoal login https://head:7700 --fingerprint sha256:4f1c...
      shoal login https://head:7700 --fingerprint sha256:4f1c... --context lab
      shoal login https://gpu.example.com --token-file ~/token
      shoal login https://a:7700,https://b:7700 --fingerprint sha256:4f1c...
      shoal login --context lab < new-token
      shoal login --context lab --oidc
      shoal login --show
    """
    import click
    import msgspec

    from shoal.cli.screen import show as screen
    from shoal.client import contexts
    from shoal.forms.failure import USAGE, Failure

    if show:
        _show(home, json)
        return
    given = str(click.get_current_context().meta.get(CONTEXT_NAME, ""))
    if url is None:
        name = given or contexts.choose("", "").name
        if name == contexts.LOCAL:
            raise Failure("URL: say which cluster, e.g. shoal login https://head:7700", USAGE)
        known = contexts.find(name)
        accepted = _accepted_any(contexts.reached(known).all_urls, fingerprint, known.certificate)
    else:
        accepted = _accepted_any(url.split(","), fingerprint, "")
        name = contexts.checked_name(given or name_of(accepted.url))
        _refuse_other(name, accepted.url)
    if oidc and token_file is not None:
        raise Failure("--oidc: gives you a token; leave --token-file out", USAGE)
    if tenant and not oidc:
        raise Failure("--tenant: has no effect without --oidc; a token has its tenant", USAGE)
    token = _by_oidc(accepted, tenant) if oidc else _token(token_file, accepted.url)
    if token.startswith("invite_"):
        token = _by_invite(accepted, token)
    context = msgspec.structs.replace(accepted, token=token)
    user = _check(context)
    with contexts.changing() as kept:
        kept.contexts[name] = context
        kept.current = name
    if json:
        screen.as_json({"context": name, "url": context.url, "user": user})
        return
    screen.line(f"logged in to {context.url} as {user}; the context is {name}", "green")
    screen.line("commands use it from now on; to use another: shoal context use NAME")


@verb()
def logout(json: bool, home: Path) -> None:  # noqa: ARG001
    """Forget the token of a cluster.

    The context stays, so that you can log in again without the fingerprint; to
    forget it as a whole use `shoal context remove`. The token itself stays valid:
    an admin ends it with `shoal token remove`.

    Examples:
      shoal logout
      shoal logout --context lab
    """
    import click
    import msgspec

    from shoal.cli.command import CHOSEN
    from shoal.cli.screen import show
    from shoal.client import contexts
    from shoal.forms.failure import Failure

    name = click.get_current_context().meta[CHOSEN].name
    if name == contexts.LOCAL:
        raise Failure("this machine's own cluster needs no login; see: shoal context list")
    contexts.find(name)
    with contexts.changing() as kept:
        known = kept.contexts.get(name)
        if known is not None:
            kept.contexts[name] = msgspec.structs.replace(known, token="")
    if json:
        show.as_json({"context": name})
    else:
        show.line(f"logged out of {name}; to log in again: shoal login --context {name}")


def _show(home: Path, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.cli.up.flags import login_address, login_line
    from shoal.client.transport import at_home
    from shoal.forms.failure import Failure

    at_home(home)  # says what is wrong if no cluster is up
    address = login_address(home)
    if not address.url.startswith("https://"):
        message = f"only this machine reaches the cluster in {home}"
        raise Failure(f"{message}; open it with: shoal down, then shoal up --host 0.0.0.0")
    if json:
        show.as_json({"url": address.url, "fingerprint": address.fingerprint})
    else:
        show.line(login_line(address))


def name_of(url: str) -> str:
    """The host's first part, or its whole address."""
    import ipaddress

    from shoal.client.transport import at

    host = at(url, "").host
    try:
        return str(ipaddress.ip_address(host)).replace(":", "-").strip("-")
    except ValueError:
        return host.partition(".")[0]


def _refuse_other(name: str, url: str) -> None:
    from shoal.client import contexts
    from shoal.forms.failure import Failure

    known = contexts.load().contexts.get(name)
    if known is not None and known.url != url:
        message = f"the context {name} is {known.url}"
        raise Failure(f"--context: {message}; give this one another name, or remove that one")


def _accepted_any(urls: Sequence[str], fingerprint: str | None, pinned: str) -> Context:
    """By the first head that answers. All heads of a cluster show certificates of one CA."""
    import msgspec

    from shoal.client import transport

    named = [one.strip() for one in urls if one.strip()] or [""]
    for number, url in enumerate(named):
        try:
            found = _accepted(url, fingerprint, pinned)
        except transport.Unreachable:
            if number == len(named) - 1:
                raise
            continue
        urls = [transport.at(one if "://" in one else f"https://{one}", "").url for one in named]
        others = tuple(one for one in urls[1:] if one != urls[0])
        last = found.url if found.url != urls[0] else ""
        return msgspec.structs.replace(found, url=urls[0], urls=others, last=last)
    raise AssertionError


def _accepted(url: str, fingerprint: str | None, pinned: str) -> Context:
    """The address, and the certificate that the user accepts. `pinned` was accepted before."""
    import http.client
    import ssl

    from shoal.client import contexts, transport
    from shoal.forms.failure import USAGE, Failure

    where = transport.at(url if "://" in url else f"https://{url}", "")
    if where.url.startswith("http://"):
        _refuse_plain(where.host)
        return contexts.Context(url=where.url)
    wanted = ""
    if fingerprint is not None:
        try:
            wanted = transport.read_fingerprint(fingerprint)
        except ValueError as error:
            raise Failure(f"--fingerprint: {error}", USAGE) from None
    if not wanted and (pinned or _is_trusted(where)):
        return contexts.Context(url=where.url, certificate=pinned)
    try:
        found = transport.presented(where)
    except ssl.SSLError as error:
        raise transport.Unreachable(f"{where.url} does not speak TLS ({error.reason})") from None
    except (OSError, http.client.HTTPException) as error:
        raise transport.Unreachable(f"no response from {where.url} ({error})") from None
    for certificate in (found.anchor, found.leaf):
        if transport.fingerprint(certificate) == wanted:
            return contexts.Context(url=where.url, certificate=certificate)
    offered = transport.fingerprint(found.anchor)
    if wanted:
        message = f"{where.url} has another certificate: expected {wanted}, found {offered}"
        advice = "compare with `shoal login --show` on the head; if they differ, someone is between"
        raise transport.WrongCertificate(f"{message}; {advice}")
    _ask(where.url, offered)
    return contexts.Context(url=where.url, certificate=found.anchor)


def _refuse_plain(host: str) -> None:
    import ipaddress

    from shoal.forms.failure import USAGE, Failure

    try:
        near = ipaddress.ip_address(host).is_loopback
    except ValueError:
        near = host == "localhost"
    if not near:  # a tunnel ends on this machine
        raise Failure("URL: http:// would send your token for all to read; use https://", USAGE)


def _is_trusted(where: Endpoint) -> bool:
    """Without a fingerprint: does this system trust the certificate for this name?"""
    from shoal.client import transport

    connection = transport.connection_to(where, 10)
    try:
        connection.connect()
    except transport.WrongCertificate:
        return False
    except OSError as error:
        raise transport.Unreachable(f"no response from {where.url} ({error})") from None
    finally:
        connection.close()
    return True


def _ask(url: str, offered: str) -> None:
    import sys

    from shoal.cli.screen import show
    from shoal.forms.failure import Failure

    message = f"{url} has a certificate that this system does not know: {offered}"
    advice = "compare it with the head's (there: shoal login --show)"
    if not sys.stdin.isatty() or not sys.stderr.isatty():
        raise Failure(f"{message}; {advice} and give it with --fingerprint")
    show.note(message)
    show.note(f"{advice}; if they differ, someone is in between")
    print("is it the same? [yes/no] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Failure("not logged in")


def _token(file: Path | None, url: str) -> str:
    """Never an argument: other users see those."""
    import sys

    from shoal.forms.failure import USAGE, Failure

    if file is not None and str(file) != "-":
        try:
            with file.expanduser().open("rb") as opened:
                data = opened.read(TOKEN_BYTES_MAX + 1)
        except OSError as error:
            message = f"cannot read {file}: {error.strerror}"
            raise Failure(f"--token-file: {message}", USAGE) from None
    elif sys.stdin.isatty():
        from getpass import getpass

        data = getpass(f"token for {url}: ").encode(errors="replace")
    else:
        data = sys.stdin.buffer.read(TOKEN_BYTES_MAX + 1)
    text = data.decode("ascii", errors="replace").strip()
    if not text:
        raise Failure("a token is needed: give it with --token-file or on stdin", USAGE)
    if len(data) > TOKEN_BYTES_MAX or not text.isascii() or not text.isprintable() or " " in text:
        raise Failure("this is not a token; copy it again", USAGE)
    return text


def _by_invite(context: Context, code: str) -> str:
    """The token that the invite becomes. It is void from then on."""
    from shoal.client import Client
    from shoal.client.contexts import reached

    with Client.to(reached(context)) as client:
        return client.accept_invite(code).secret


def _by_oidc(context: Context, tenant: str) -> str:
    """The token that the head gives when the person has agreed at the provider."""
    import time

    from shoal.cli.screen import show
    from shoal.client import Client
    from shoal.client.contexts import reached
    from shoal.forms.failure import Failure
    from shoal.model.durations import duration_text

    with Client.to(reached(context)) as client:
        begun = client.begin_device(tenant)
        show.note(f"open {begun.url} in a browser, and enter the code {begun.user_code}")
        if begun.url_complete:
            show.note(f"or open {begun.url_complete}")
        deadline = time.monotonic() + begun.expires_ms / 1000
        pause_ms = begun.interval_ms
        while time.monotonic() < deadline:
            time.sleep(pause_ms / 1000)
            answer = client.poll_device(begun.handle)
            if answer.secret:
                return answer.secret
            pause_ms = max(answer.interval_ms, 100)
    raise Failure(f"nobody entered the code within {duration_text(begun.expires_ms)}; try again")


def _check(context: Context) -> str:
    """Who the token's user is; ShoalError if the cluster does not accept it."""
    from shoal.client import Client
    from shoal.client.contexts import reached

    with Client.to(reached(context)) as client:
        return client.me().user


# `shoal context`: the clusters that a user knows, and which one commands use.


ACTIONS = {"list": 0, "use": 1, "remove": 1}  # -> how many names it takes


@verb(
    Argument("action", "[list|use|remove]", "What to do. [list]", required=False, default="list"),
    Argument("names", "[NAME]", "A context; local is the home on this machine.", nargs=-1),
)
def context(action: str, names: tuple[str, ...], json: bool, home: Path) -> None:
    """List your clusters, or choose which one commands use.

    Each `shoal login` makes a context. The name local stands for the cluster
    on this machine, in --home.

    A command uses the cluster that --context or --home names; else the one that
    $SHOAL_CONTEXT or $SHOAL_HOME names; else the one chosen by `use` or by the
    last login; else the one in ~/.shoal. list marks it and says why.

    Examples:
      shoal context
      shoal context use lab
      shoal context use local
      shoal context remove lab
      SHOAL_CONTEXT=lab shoal ps
    """
    import click

    from shoal.cli.screen import show
    from shoal.forms import units

    if action not in ACTIONS:
        raise Failure(
            f"unknown command 'shoal context {units.quoted(action)[1:-1]}'; "
            f"use one of {', '.join(ACTIONS)}",
            USAGE,
        )
    if len(names) != ACTIONS[action]:
        wants = "takes no name" if not ACTIONS[action] else "needs the name of one context"
        raise Failure(f"{action}: {wants}; see: shoal context --help", USAGE)
    if action == "list":
        _list(click.get_current_context().meta[CHOSEN], home, json)
        return
    (_use if action == "use" else _remove)(names[0])
    if json:
        show.as_json({"context": names[0]})
    elif action == "use":
        show.line(f"commands use {names[0]} from now on")
    else:
        show.line(f"{names[0]} is removed, with its token")


def _list(chosen: Chosen, home: Path, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.client import contexts
    from shoal.client.transport import fingerprint

    known = contexts.load().contexts
    rows = [(contexts.LOCAL, str(home), "")]
    for name, one in known.items():
        trust = fingerprint(one.certificate) if one.certificate else "by this system"
        rows.append((name, one.url if one.token else f"{one.url} (logged out)", trust))
    if json:
        listed = [
            {"name": name, "where": where, "trusted": trust, "used": name == chosen.name}
            for name, where, trust in rows
        ]
        show.as_json({"used": chosen.name, "why": chosen.why, "contexts": listed})
        return
    columns = [show.Column(title) for title in ("NAME", "IN USE", "WHERE", "TRUSTED")]
    cells = [[name, "yes" if name == chosen.name else "", *rest] for name, *rest in rows]
    show.table(columns, cells)
    show.note(f"commands use {chosen.name}: {chosen.why}")
    if chosen.name not in {row[0] for row in rows}:
        show.note(f"there is no context {chosen.name}; add it with: shoal login")


def _use(name: str) -> None:
    from shoal.client import contexts

    if name != contexts.LOCAL:
        contexts.find(name)
    with contexts.changing() as kept:
        kept.current = "" if name == contexts.LOCAL else name


def _remove(name: str) -> None:
    from shoal.client import contexts

    if name == contexts.LOCAL:
        raise Failure(
            "local is the home on this machine and stays in the list; to end it: shoal down"
        )
    contexts.find(name)
    with contexts.changing() as kept:
        kept.contexts.pop(name, None)
        if kept.current == name:
            kept.current = ""


# `shoal page`: a link that signs the user in to the page.


@verb()
def page(json: bool, home: Path) -> None:
    """Print a link that signs you in to the web page.

    The link works for two minutes, once. At a terminal with a desktop the page
    also opens in your browser. You can sign in with the token as well.

    Examples:
      shoal page
      shoal page --json | jq -r .url
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        link = client.page_link()
    if json:
        show.as_json({"url": link})
        return
    show.line(link)
    if show.at_terminal() and has_desktop():
        import webbrowser

        webbrowser.open(link)


def has_desktop() -> bool:
    """Without a desktop, a text browser might open in the terminal."""
    return sys.platform == "darwin" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )


# `shoal completion`: prints what a shell needs to complete shoal's verbs, flags and names.


WHERE = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc",
    "fish": "~/.config/fish/completions/shoal.fish",
}


@verb(Argument("shell", "bash|zsh|fish", "The shell that you use."), home=False)
def completion(shell: str, json: bool) -> None:
    """Print shell completion for verbs and names.

    Add one line to your shell's configuration, and start a new shell. The Tab key
    then completes verbs, flags, and the names of jobs, nodes, services, contexts,
    tenants, users, tokens and secrets. If the cluster does not answer within half a
    second, it completes without names. bash needs version 4.4 or later.

    Examples:
      shoal completion fish > ~/.config/fish/completions/shoal.fish
      echo 'eval "$(shoal completion bash)"' >> ~/.bashrc
      echo 'eval "$(shoal completion zsh)"' >> ~/.zshrc
    """
    from shoal.cli.completion import SHELLS, script
    from shoal.cli.screen import show

    if shell not in SHELLS:
        message = f"SHELL: {shell[:40]!r} is not one of {', '.join(SHELLS)}"
        raise Failure(f"{message}; see: shoal completion --help", USAGE)
    if json:
        show.as_json({"shell": shell, "configuration": WHERE[shell], "script": script(shell)})
    else:
        print(script(shell))
