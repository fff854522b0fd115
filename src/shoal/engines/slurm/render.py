"""What we ask of Slurm, exactly: commands, the batch script, and what its nodes are told. Pure."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shoal.model.supply import ORDER_PATTERN, Provision, Supply
from shoal.ports import Supplier, SupplierKind, SupplyContext, SupplyError

OUTPUT = "%A\t%j\t%u\t%T\t%r\t%e\t%N"  # of squeue; `read.jobs_of_lines` reads it
NOTICE_S = 120  # how long before the time limit Slurm sends a signal
COMMENT_CHARACTERS_MAX = 200
# All that Slurm's commands, and so its jobs, get of the controller's environment. Variables such as
# SBATCH_PARTITION would change our orders, and SLURM_JOB_ID those of a head in a job of Slurm's.
KEPT = ("HOME", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SLURM_CONF", "TZ", "USER")

# What a supply may say under `options`, and what such a word looks like.
WORD = r"[A-Za-z0-9_.@+:=-]+"
NODES = r"[A-Za-z0-9_.,\[\]-]+"
OPTIONS: Mapping[str, str] = {
    "partition": r"[A-Za-z0-9_.,-]+",
    "account": WORD,
    "qos": WORD,
    "reservation": r"[A-Za-z0-9_.,@+:=-]+",
    "constraint": r"[A-Za-z0-9_.,:&|!*()\[\]=+-]+",
    "nodelist": NODES,
    "exclude": NODES,
    "gres": r"[A-Za-z0-9_.,:/=-]+",  # instead of --gpus-per-node
    "whole": "yes|no|true|false",  # the whole machine, whatever it has
    "python": r"/[^\0\n]*",  # on the machines, if it is not the head's own
    "folder": r"/[^\0\n]*",  # on the machines' own disks
}


def _build(context: SupplyContext) -> Supplier:
    from shoal.engines.slurm.supplier import SlurmSupplier

    return SlurmSupplier(context)


SUPPLIER = SupplierKind("Slurm", OPTIONS, _build)
_PASSED_ON = ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cluster is: what all of its orders have in common."""

    cluster: str  # 8 hex digits
    folder: str  # HOME/slurm, which the machines see, too
    url: str
    python: str
    path: str  # where Slurm's commands and the shell's are


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the machines of an order are told, in a file that only its owner can read: the token
    must not be on a command line, in Slurm's environment or in its accounting."""

    url: str
    token: str
    cluster: str
    order: str
    supply: str
    nodes: tuple[str, ...]  # what the nodes are called, in the order of SLURM_NODEID
    python: str
    folder: str
    checkpoints: str
    gpu_model: str = ""
    gpu_memory_mb: int = 0
    labels: dict[str, str] = {}
    taints: tuple[str, ...] = ()


def job_name(cluster: str, order: str) -> str:
    return f"shoal-{cluster}-{order}"


def order_of(cluster: str, name: str) -> str:
    """The order that a job of this name serves; "" if it is none of this cluster's."""
    prefix = f"shoal-{cluster}-"
    order = name.removeprefix(prefix)
    return order if order != name and re.match(ORDER_PATTERN, order) else ""


def sbatch(command: Provision, place: Place) -> list[str]:
    """The arguments; the script goes to its standard input. Arguments win over the SBATCH_...
    variables of whoever started the cluster, and need no quoting."""
    supply = command.supply
    options = checked(supply)
    return [
        "sbatch",
        "--parsable",
        f"--job-name={job_name(place.cluster, command.order)}",
        f"--comment={comment(command, place)}",
        f"--nodes={supply.lot}",
        "--ntasks-per-node=1",
        *_amounts(supply, options),
        *_time(supply),
        # An order that ended is over: the core decides whether to place another.
        "--no-requeue",
        "--no-kill",  # the other nodes of a lot outlive the failure of one
        f"--signal=B:USR1@{NOTICE_S}",
        f"--output={base(command.order, place).replace('%', '%%')}.out",
        "--open-mode=truncate",
        "--chdir=/",
        "--export=ALL",  # of the few variables in `environment`
        *(f"--{name}={options[name]}" for name in _PASSED_ON if name in options),
    ]


def script(command: Provision, place: Place) -> str:
    """Runs on the first node of the allocation. It asks Slurm once for what all nodes want to
    know, and starts one agent on each."""
    options = checked(command.supply)
    python = options.get("python", place.python)
    return SCRIPT.format(
        path=shlex.quote(place.path),
        base=shlex.quote(base(command.order, place)),
        python=shlex.quote(python),
        nodes=command.supply.lot,
    )


SCRIPT = """\
#!/bin/sh
# Brings Shoal's agent to each node of this allocation. The jobs of that Shoal cluster run in it,
# and nothing else does. `scancel` ends it; Shoal then runs those jobs elsewhere.
umask 077
export PATH={path}
base={base}
python={python}
if ! [ -r "$base.json" ]; then
    echo "$(hostname): cannot read $base.json: the home of the Shoal cluster must be in a folder" \\
        "that all machines share (see shoal up --home)"
    exit 1
fi
: "${{SLURM_JOB_END_TIME:=$(SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$SLURM_JOB_ID" \\
    --format=%e)}}"
export SLURM_JOB_END_TIME
scontrol --oneliner show node "$SLURM_JOB_NODELIST" >"$base.nodes"
srun --export=ALL --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --mem=0 --cpu-bind=none \\
    --no-kill --kill-on-bad-exit=0 --unbuffered \\
    "$python" -m shoal.engines.slurm.machine "$base.json" &
agents=$!
trap 'date +%s >"$base.notice"' USR1
trap 'kill -TERM "$agents"' TERM
code=0
while kill -0 "$agents" 2>/dev/null; do
    wait "$agents"
    code=$?
done
exit "$code"
"""


def settings(command: Provision, place: Place, token: str) -> bytes:
    supply = command.supply
    options = checked(supply)
    told = Settings(
        url=place.url,
        token=token,
        cluster=place.cluster,
        order=command.order,
        supply=supply.name,
        nodes=command.nodes,
        python=options.get("python", place.python),
        folder=options.get("folder", "/tmp"),
        checkpoints=str(Path(place.folder).parent / "checkpoints"),
        gpu_model=supply.gpu_model,
        gpu_memory_mb=supply.gpu_memory_mb,
        labels=supply.labels,
        taints=supply.taints,
    )
    return msgspec.json.format(msgspec.json.encode(told)) + b"\n"


def base(order: str, place: Place) -> str:
    return str(Path(place.folder) / order)


def comment(command: Provision, place: Place) -> str:
    """For those who read `squeue -o %k` or `scontrol show job`, in plain characters: Slurm keeps it
    in its own files."""
    why = f": {command.why}" if command.why else ""
    text = (
        f"Shoal agents for cluster {place.cluster} at {place.url}, order {command.order} of supply "
        f"{command.supply.name}{why}"
    )
    text = "".join(c if c.isascii() and c.isprintable() and c not in "'\"\\" else " " for c in text)
    return text[:COMMENT_CHARACTERS_MAX].rstrip()


def checked(supply: Supply) -> dict[str, str]:
    """Its options, all of them known and well-formed."""
    for name, value in supply.options.items():
        if name not in OPTIONS:
            known = ", ".join(OPTIONS)
            raise SupplyError(f"{name}: Slurm's supply {supply.name} has no such option: {known}")
        if not re.fullmatch(OPTIONS[name], value):
            raise SupplyError(f"{name}: '{value[:60]}' is not what sbatch understands")
    return supply.options


def _amounts(supply: Supply, options: Mapping[str, str]) -> list[str]:
    """Exactly what the supply says its nodes have; of a whole machine, everything."""
    argv = []
    if options.get("whole") in ("yes", "true"):
        argv += ["--exclusive", "--mem=0"]
    else:
        if supply.cpu_milli:
            argv.append(f"--cpus-per-task={math.ceil(supply.cpu_milli / 1000)}")
        if supply.memory_mb:
            argv.append(f"--mem={supply.memory_mb}M")
    if "gres" in options:
        argv.append(f"--gres={options['gres']}")
    elif supply.gpus:
        argv.append(f"--gpus-per-node={supply.gpus}")
    return argv


def _time(supply: Supply) -> list[str]:
    """In whole minutes, which is how Slurm counts. Otherwise the partition's default holds."""
    return [f"--time={math.ceil(supply.lasts_ms / 60_000)}"] if supply.lasts_ms else []


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    return {name: ours[name] for name in KEPT if name in ours} | {"LANG": "C.UTF-8"}


def squeue() -> list[str]:
    """All jobs of this user that Slurm remembers, also those that have ended."""
    return ["squeue", "--me", "--states=all", "--noheader", f"--format={OUTPUT}"]


def squeue_json() -> list[str]:
    return ["squeue", "--me", "--states=all", "--json"]


def scancel(ids: list[str]) -> list[str]:
    return ["scancel", "--me", *ids]


def drain(machine: str, why: str) -> list[str]:
    reason = "".join(c if c.isprintable() else " " for c in f"Shoal: {why}")
    return [
        "scontrol",
        "update",
        f"NodeName={machine}",
        "State=DRAIN",
        f"Reason={reason[:COMMENT_CHARACTERS_MAX]}",
    ]


def partitions() -> list[str]:
    return ["scontrol", "--oneliner", "show", "partition"]
