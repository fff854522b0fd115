"""`shoal help`: the verbs of a topic with an example each, or the help page of a verb."""

from __future__ import annotations

from shoal.cli.command import EXAMPLES, Argument, verb
from shoal.cli.first_page import COLUMNS, THEMES, VERBS, first_page
from shoal.forms.failure import USAGE, Failure

TOPICS = {title.lower(): verbs for title, verbs in THEMES.items()}
ALL = "all"


@verb(
    Argument("topic", "[TOPIC]", "A topic, `all`, or a verb. [the first page]", required=False),
    home=False,
)
def help(topic: str | None, json: bool) -> None:  # noqa: A001
    """Show the verbs of a topic, or the help of a verb.

    The topics are jobs, interactive, automation, services, cluster, nodes,
    accounting, people, remote and planning; `all` shows every topic.

    Examples:
      shoal help jobs
      shoal help all
      shoal help run
    """
    from shoal.cli.screen import show

    word = (topic or "").lower()
    if word and word not in (*TOPICS, ALL, *VERBS):
        raise Failure(f"unknown topic {word[:40]!r}; {_hint(word)}", USAGE)
    chosen = {name: verbs for name, verbs in TOPICS.items() if word in ("", ALL, name)}
    if json:
        named = {name: {verb: VERBS[verb] for verb in verbs} for name, verbs in chosen.items()}
        show.as_json(named)
    elif not word:
        print(first_page(), end="")
    elif chosen:
        print("\n\n".join("\n".join(_lines(name)) for name in chosen))
    else:
        _print_verb(word)


def _hint(word: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(word, [*TOPICS, *VERBS], n=1)
    return f"did you mean: shoal help {close[0]}" if close else f"topics: {', '.join(TOPICS)}"


def _lines(topic: str) -> list[str]:
    width = max(map(len, TOPICS[topic]))
    lines = [f"{topic.capitalize()}:"]
    for name in TOPICS[topic]:
        lines.append(f"  {name:{width}}  {VERBS[name]}")
        lines.append(f"  {'':{width}}  $ {_example(name, COLUMNS - width - 6)}")
    return lines


def _example(name: str, room: int) -> str:
    """The first one on the verb's own page that fits, without what is said about it."""
    import click

    from shoal.cli.app import shoal

    command = shoal.get_command(click.Context(shoal), name)
    listed = (command.help or "").partition(EXAMPLES)[2].splitlines()
    examples = [line.strip().partition("   ")[0] for line in listed]
    whole = [text for text in examples if text.startswith("shoal ") and text[-1] != "\\"]
    return next((text for text in whole if len(text) <= room), whole[0])


def _print_verb(name: str) -> None:
    import click

    from shoal.cli.app import shoal

    parent = click.Context(shoal, info_name="shoal", **shoal.context_settings)
    command = shoal.get_command(parent, name)
    print(command.get_help(click.Context(command, info_name=name, parent=parent)))
