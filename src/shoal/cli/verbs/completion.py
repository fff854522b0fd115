"""`shoal completion`: prints what a shell needs to complete shoal's verbs, flags and names."""

from __future__ import annotations

from shoal.cli.command import Argument, verb
from shoal.forms.failure import USAGE, Failure

WHERE = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc",
    "fish": "~/.config/fish/completions/shoal.fish",
}


@verb(Argument("shell", "bash|zsh|fish", "The shell that you use."), home=False)
def completion(shell: str, json: bool) -> None:
    """Print what your shell needs to complete verbs and names.

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
