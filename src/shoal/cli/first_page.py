"""The verbs by topic, and the page that `shoal --help` prints: without Click, which takes longer to
load than all the rest."""

from __future__ import annotations

# By topic: a verb, the module that has its function, and its summary, which is here so that
# `shoal --help` imports no verb; a test compares it with the verb's own help.
THEMES = {
    "Jobs": {
        "run": ("run", "Run a command, or a gang of them, on the cluster."),
        "map": ("map", "Run a function over the lines of a file, on all cores."),
        "ps": ("ps", "List jobs."),
        "sweep": ("sweep", "Compare the trials of a sweep, and show the best."),
        "logs": ("logs", "Print the output of jobs, or of a service's newest replica."),
        "why": ("explain", "Show why a job, node or service is in its state, or a user waits."),
        "explain": ("explain", "Show what happened to a job, on one page."),
        "cancel": ("cancel", "Cancel jobs."),
        "requeue": ("cancel", "Stop jobs and run them again."),
        "retry": ("cancel", "Run the failed elements of arrays again."),
        "sleep": ("cancel", "Suspend jobs and free their GPUs."),
        "wake": ("cancel", "Resume suspended jobs where they stopped."),
        "note": ("nodes", "Add a note to a job, or show its notes."),
    },
    "Interactive": {
        "exec": ("inside", "Run a command inside a running job."),
        "attach": ("inside", "Attach to the terminal of an interactive job."),
        "dev": ("dev", "Open a notebook or editor on the cluster, in your browser."),
        "forward": ("inside", "Forward local ports to a running job."),
        "ssh-config": ("inside", "Print or write ssh entries for running jobs."),
        "ssh-proxy": ("inside", "Connect ssh to a running job; used by ssh-config."),
        "ls": ("inside", "List the files that a job has kept."),
        "cp": ("inside", "Copy files to or from a job."),
    },
    "Automation": {
        "schedule": ("schedule", "Run a command, job file or workflow on a schedule."),
        "workflow": ("schedule", "Show the jobs of a workflow as a graph."),
        "notify": ("notify", "Send messages when something happens."),
        "secret": ("notify", "Set, list or remove secrets for your jobs."),
    },
    "Services": {
        "serve": ("services", "Serve a command behind one URL, or update a service."),
        "services": ("services", "List services and their load."),
        "service": ("services", "Show a service and its replicas, roll it back, or stop it."),
        "key": ("key", "List, add or revoke keys for calling services."),
    },
    "Cluster": {
        "up": ("up", "Start a cluster on this machine."),
        "down": ("up", "Stop the cluster and everything running on it."),
        "status": ("status", "Show the whole cluster on one screen."),
        "top": ("status", "Watch jobs, nodes and services live."),
        "page": ("login", "Print a link that signs you in to the web page."),
        "events": ("explain", "Show what happened, one line per event."),
        "heads": ("up", "List the heads of this cluster, or invite another one."),
        "upgrade": ("up", "Upgrade the cluster to this version; jobs keep running."),
        "install-service": ("join", "Start this machine's part of a cluster at boot."),
        "backup": ("backup", "Back up the cluster to one file, while it runs."),
        "restore": ("backup", "Restore a cluster from a backup."),
        "salvage": ("backup", "Recover what is readable from a damaged store."),
    },
    "Nodes": {
        "nodes": ("nodes", "List nodes and what is in use on them."),
        "cordon": ("nodes", "Start nothing new on nodes; running jobs continue."),
        "drain": ("nodes", "Move jobs off nodes, and start nothing new on them."),
        "uncordon": ("nodes", "Make nodes available again."),
        "label": ("nodes", "Set or remove labels on nodes or jobs."),
        "taint": ("nodes", "Keep jobs off nodes, unless they tolerate the taint."),
        "join": ("join", "Add this machine to a cluster as a node."),
        "leave": ("join", "Remove this machine from its cluster."),
        "ends": ("nodes", "Set when this machine's node goes away."),
        "supply": ("status", "Show where nodes come from, and what was ordered."),
        "check": ("check", "Benchmark nodes and compare them with similar ones."),
        "slurm-commands": ("join", "Install sbatch, srun and others, for Slurm scripts."),
    },
    "Accounting": {
        "report": ("report", "Show where GPU time and money went."),
        "prices": ("policy", "Show, check or change the price list."),
        "policy": ("policy", "Show, check, compare or change the scheduling policy."),
    },
    "People": {
        "user": ("tenant", "List, add, invite, change or remove users."),
        "tenant": ("tenant", "List, add or remove tenants."),
        "token": ("token", "List, add, rotate or remove access tokens."),
        "audit": ("tenant", "Show who did what, or verify the audit log."),
        "oidc": ("tenant", "Show, set or remove single sign-on (OpenID Connect)."),
        "whoami": ("tenant", "Show your user, tenant, role and token."),
    },
    "Remote": {
        "login": ("login", "Log in to a cluster on another machine."),
        "logout": ("login", "Forget the token of a cluster."),
        "context": ("login", "List your clusters, or choose which one commands use."),
        "neighbor": ("neighbor", "Let another cluster hand over jobs to this one."),
        "completion": ("login", "Print shell completion for verbs and names."),
    },
    "Planning": {
        "plan": ("plan", "Plan a cluster: how many GPUs, for how long, at what cost."),
        "sim": ("sim", "Replay a trace or your own history under other policies."),
        "import": ("report", "Show where a Slurm site's GPU time went."),
        "demo": ("demo", "Watch a small cluster lose a node and recover, in 30 s."),
        "help": ("help", "Show the verbs of a topic, or the help of a verb."),
    },
}
VERBS = {name: summary for verbs in THEMES.values() for name, (_, summary) in verbs.items()}
MODULES = {name: module for verbs in THEMES.values() for name, (module, _) in verbs.items()}

# What somebody needs on the first day, in this order.
FIRST = ("demo", "up", "status", "run", "ps", "logs", "why", "cancel", "serve", "page")
assert set(FIRST) <= set(VERBS)

COLUMNS = 80

USAGE = """\
Usage: shoal [OPTIONS] VERB ...

Shoal turns the machines you have into one AI cluster.
"""
OPTIONS = """\
Options:
  --home DIR      Folder of a cluster on this machine. [$SHOAL_HOME or ~/.shoal]
  --context NAME  A cluster from `shoal context list`. [$SHOAL_CONTEXT]
  --version       Print the version.
  --help          Show this message and exit.
"""
EPILOG = """\
Exit codes: 0 success, 1 failed or refused, 2 wrong usage, 3 cannot reach a
cluster, 130 interrupted. `shoal run --wait` exits with the job's exit code.

Examples:
  shoal demo                              try it; nothing is left behind
  shoal up --nodes 4 --gpus 8             start four virtual nodes here
  shoal run -n 2 -g 8 -- python train.py  run two processes with 8 GPUs each
  shoal logs -f j1                        follow its output
  shoal serve chat --replicas 1..8 -g 1 -- python server.py
"""


def first_page() -> str:
    """What a newcomer needs, then the other verbs by name."""
    width = max(map(len, THEMES))
    lines = [f"  {name:{width}}  {VERBS[name]}" for name in FIRST]
    topics = []
    for topic, verbs in THEMES.items():
        others = [name for name in verbs if name not in FIRST]
        topics += _filled(f"  {topic.lower():{width}}  ", others)
    return "\n".join(
        [
            *(USAGE, "Start here:", *lines, ""),
            *("More verbs by topic (for details: shoal help TOPIC):", *topics, ""),
            *(OPTIONS, EPILOG),
        ]
    )


def _filled(first: str, words: list[str]) -> list[str]:
    lines = [first]
    for word in words:
        if len(lines[-1]) + len(word) > COLUMNS:
            lines.append(" " * len(first))
        lines[-1] += f"{word} "
    return [line.rstrip() for line in lines]
