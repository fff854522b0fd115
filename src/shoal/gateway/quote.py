"""Quotes text by HAProxy's grammar: the only way of foreign text into the file or the socket.

The grammar has layers. A line is cut into words; a word may be a format, in which `%` begins a
variable, or an expression with arguments, or a pattern after flags. Each layer has its own quotes,
and those of the word come last.
"""

from __future__ import annotations

import re

from shoal.gateway.binary import GatewayError

BARE_WORD = re.compile(r"[A-Za-z0-9._:/@+,=()\[\]-]+")
BARE_ARGUMENT = re.compile(r"[A-Za-z0-9._-]+")
NAME = re.compile(r"[A-Za-z0-9_.:-]+")  # HAProxy's own rule for backends and servers


class Refused(GatewayError):
    """The proxy cannot take this text, or this configuration."""


def word(text: str) -> str:
    """One word that means exactly this text. Only strong quotes leave `$` alone."""
    if not text.isprintable():
        raise Refused(f"{text[:64]!r} cannot be in the proxy's configuration: it is not one line")
    if BARE_WORD.fullmatch(text):
        return text
    return "'" + text.replace("'", "'\\''") + "'"


def pattern(text: str) -> str:
    """What an ACL compares with, at its end: without `--`, the text could be a flag."""
    if text in ("", "}"):
        raise Refused(f"{text!r} cannot be compared with in the proxy's configuration")
    return f"-- {word(text)}"


def call(function: str, argument: str) -> str:
    """An expression with one argument, which may be followed by `,converters`."""
    if not BARE_ARGUMENT.fullmatch(argument):
        argument = '"' + argument.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return word(f"{function}({argument})")


def in_format(text: str) -> str:
    """A part of a format; the whole format is then a `word`."""
    return text.replace("%", "%%")


def name(text: str) -> str:
    """A backend's or a server's name. It is also a part of commands on the socket, whose words no
    quotes keep together."""
    if not NAME.fullmatch(text):
        raise Refused(f"{text[:64]!r} cannot be a name in the proxy's configuration")
    return text


def server(service: str, replica: str) -> str:
    """A server in a command on the socket."""
    return f"{name(service)}/{name(replica)}"
