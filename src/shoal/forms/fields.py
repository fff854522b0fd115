"""The one table of fields: what a job and a service can be given, wherever it is written.

The flags of `shoal run` and `shoal serve`, job and service files, the keywords of `shoal.Client`,
the descriptions in the API's schema and the tables of docs/job-files.md all come from here. A new
field needs one entry here, and its target in the spec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.forms import readers, units
from shoal.forms.failure import BadField
from shoal.forms.readers import (
    GPU_MEMORY_MB_MAX,
    Choice,
    Count,
    Reader,
    environment,
    kind,
    memory,
    time,
    wrong,
)

if TYPE_CHECKING:
    from datetime import datetime


# How `after` and `begin` are read: which jobs to wait for, and until when.


AFTER_MAX = 256
AFTER_PATTERN = r"j[1-9][0-9]{0,17}(\.[0-9]{1,9})?(:(ok|any|fail))?"
AFTER_FORMS = "write j7, j7:any or j7:fail"


def texts(field: str, value: Any) -> tuple[str, ...]:
    """One name, or a list of names; commas separate names, too."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise wrong(field, value, f"a job or a list of jobs; {AFTER_FORMS}")
    if len(found) > AFTER_MAX:
        raise BadField(field, f"names {len(found)} jobs; the maximum is {AFTER_MAX}")
    return tuple(one.strip() for text in found for one in text.split(","))


def after(field: str, value: Any) -> tuple[str, ...]:
    found = texts(field, value)
    for text in found:
        if not re.fullmatch(AFTER_PATTERN, text):
            raise BadField(field, f"{units.quoted(text)} does not name a job; {AFTER_FORMS}")
    return found


def begin(field: str, value: Any) -> int:

    return moment_ms(field, value)


# Points in time as people write them: '2026-11-17 03:00', '03:00', 'in 2h', or ISO 8601.


MOMENT_FORMS = "write e.g. 'in 2h', '03:00', '2026-11-17 03:00' or '2026-11-17T03:00+01:00'"
_CLOCK = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?")


def moment_ms(field: str, value: Any, now: datetime | None = None) -> int:
    """Milliseconds since the epoch. Without a zone, the zone of this machine is meant; a time of
    day alone is the next one."""
    from datetime import datetime

    if isinstance(value, datetime):  # as TOML has it
        value = value.isoformat()
    if not isinstance(value, str):
        raise BadField(field, f"must be a time; {MOMENT_FORMS}")
    text, now = value.strip(), now or datetime.now().astimezone()
    if text.lower().startswith("in "):
        try:
            return _ms(now) + units.duration_ms(text[3:])
        except units.BadAmount as error:
            raise BadField(field, str(error)) from None
    if (clock := _CLOCK.fullmatch(text)) is not None:
        return _ms(_next(now, *(int(part or 0) for part in clock.groups())))
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadField(field, f"{units.quoted(text)} is not a time; {MOMENT_FORMS}") from None
    try:
        at_ms = _ms(found if found.tzinfo else found.astimezone())
    except (OverflowError, OSError, ValueError):
        at_ms = -1
    if at_ms < 0:
        raise BadField(field, f"{units.quoted(text)} is too far away")
    return at_ms


def _next(now: datetime, hour: int, minute: int, second: int) -> datetime:
    """The next time of day, also if the clocks change until then."""
    from datetime import timedelta

    local = now.astimezone().replace(tzinfo=None)
    found = local.replace(hour=hour, minute=minute, second=second, microsecond=0)
    return (found if found > local else found + timedelta(days=1)).astimezone()


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


# Reads what makes a job an array: `array`, `grid` and `list`.


# As in model/sweep.py, which a help page must not load.
ELEMENTS_MAX, INDEX_MAX, RANGES_MAX = 1_000_000, 999_999_999, 256
FORMS = "write e.g. 0-99, 0-9:3, 1,5-7, and %8 behind it for 8 at a time"
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18})(?::([0-9]{1,18}))?)?")


def array(field: str, value: Any) -> tuple[list[list[int]], int]:
    """The ranges of indices, each as first, last and step; and how many at a time (0: any). Only
    %8 is for a sweep, whose variables say which elements there are."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong(field, value, f"a range of indices; {FORMS}")
    words, percent, most = str(value).replace(" ", "").partition("%")
    parts = words.split(",") if words or not percent else []
    if len(parts) > RANGES_MAX:
        raise BadField(field, f"has {len(parts)} ranges; the maximum is {RANGES_MAX}")
    ranges = [_range(field, part, str(value)) for part in parts]
    if not percent:
        return ranges, 0
    if not re.fullmatch(r"[0-9]{1,9}", most) or not 1 <= int(most) <= ELEMENTS_MAX:
        raise BadField(
            field, f"{units.quoted(str(value))} does not say how many at a time; {FORMS}"
        )
    return ranges, int(most)


def _range(field: str, part: str, value: str) -> list[int]:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise BadField(field, f"{units.quoted(value)} is not a range of indices; {FORMS}")
    first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
    if last < first:
        raise BadField(field, f"{first}-{last} is backwards; write {last}-{first}")
    if last > INDEX_MAX:
        raise BadField(field, f"{last} is too large; the largest index is {INDEX_MAX:,}")
    if not step:
        raise BadField(field, "a step of 0 never ends; write 1 or more")
    return [first, last, min(step, INDEX_MAX)]


def grid(field: str, value: Any) -> dict[str, list[str]]:
    if isinstance(value, list | tuple):
        pairs = [_values(field, text) for text in value]
        value = dict(pairs)
        if len(value) < len(pairs):
            raise _twice(field, [name for name, _ in pairs])
    if not isinstance(value, dict) or not value:
        raise wrong(field, value, "variables with lists of values, e.g. {lr: [0.1, 0.01]}")
    found = {}
    for name, values in value.items():
        if not isinstance(values, list | tuple):
            fix = "write a list of values, e.g. [0.1, 0.01]"
            raise BadField(field, f"{units.quoted(str(name))} is {kind(values)}; {fix}")
        texts = [_value(one) for one in values]
        found[str(name)] = [environment(field, {name: text})[str(name)] for text in texts]
    return found


def rows(field: str, value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list | tuple) or not value:
        raise wrong(field, value, "a list of variables with values, e.g. [{lr: 0.1}, {lr: 0.01}]")
    found = []
    for number, row in enumerate(value):
        if isinstance(row, str):
            row = _row(field, row)
        if not isinstance(row, dict):
            raise BadField(field, f"row {number} is {kind(row)}; write e.g. {{lr: 0.1}}")
        found.append(environment(field, {name: _value(one) for name, one in row.items()}))
    return found


def _values(field: str, text: Any) -> tuple[str, list[str]]:
    """'lr=0.1,0.01', as a flag has it."""
    name, equals, values = str(text).partition("=")
    if not equals or not values.strip():
        raise BadField(field, f"{units.quoted(str(text))} has no values; write e.g. lr=0.1,0.01")
    return name.strip(), [value.strip() for value in values.split(",")]


def _row(field: str, text: str) -> dict[str, str]:
    """'lr=0.1,seed=1', as a flag has it."""
    pairs = []
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise BadField(field, f"{units.quoted(text)} is not a row; write e.g. lr=0.1,seed=1")
        pairs.append((name.strip(), value.strip()))
    row = dict(pairs)
    if len(row) < len(pairs):
        raise _twice(field, [name for name, _ in pairs])
    return row


def _twice(field: str, names: list[str]) -> BadField:
    """Without this the last one would win, and a part of the sweep would be missing in silence."""
    name = next(name for name in names if names.count(name) > 1)
    return BadField(field, f"{units.quoted(name)} is given twice; write all its values once")


def _value(value: Any) -> Any:
    """Numbers and switches as they are written in the file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else value


# Volumes as people write them: SOURCE:NAME[:ro].


def volumes(field: str, value: Any) -> tuple[str, ...]:
    from shoal.model.volume import VOLUME_PATTERN, VOLUMES_MAX, volumes_problem

    found = tuple(
        readers.text(field, one) for one in (value if isinstance(value, list | tuple) else [value])
    )
    for one in found:
        if not re.fullmatch(VOLUME_PATTERN, one):
            problem = "is not SOURCE:NAME or SOURCE:NAME:ro, such as /data/imagenet:data:ro"
            raise BadField(field, f"{units.quoted(one)} {problem}")
    if len(found) > VOLUMES_MAX:
        raise BadField(field, f"names more than {VOLUMES_MAX} volumes")
    if wrong := volumes_problem(found):
        raise BadField(field, wrong)
    return found


def volume_names(field: str, value: Any) -> tuple[str, ...]:
    from shoal.model.volume import VOLUME_NAME_PATTERN

    names = tuple(
        readers.text(field, one) for one in (value if isinstance(value, list | tuple) else [value])
    )
    for name in names:
        if not re.fullmatch(VOLUME_NAME_PATTERN, name):
            raise BadField(field, f"{units.quoted(name)} is not the name of a volume, such as data")
    return names


# Which clusters a job may run on: any, neighbors by name, or what they must be like.


def clusters(field: str, value: Any) -> str:
    from shoal.model.neighbor import wish_of

    text = ",".join(part.strip() for part in readers.text(field, value).split(","))
    try:
        wish_of(text)
    except ValueError as error:
        forms = "write any, names of neighbors, or conditions such as price<2,region=eu"
        raise BadField(field, f"{error}; {forms}") from None
    return text


DAY_MS = 86_400_000


class Field(NamedTuple):
    """`metavar` may begin with a short flag, and ends with ... if the flag can be repeated.
    `default` is text for people. `targets` are the names that it sets in the spec, separated by
    spaces; a field without any is used by the program that sends the job."""

    name: str
    metavar: str
    default: str
    read: Reader
    targets: str
    help: str
    heading: str = ""  # on the help page; a field without one is not a flag

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def takes(self) -> type:
        """What the flag takes: text, a whole number, nothing (bool), or text repeatedly (list)."""
        if isinstance(self.read, Count):
            return int
        if self.read is readers.switch:
            return bool
        return list if self.metavar.endswith("...") else str

    @property
    def is_path(self) -> bool:
        """A relative one counts from the folder of the file that it is written in."""
        return self.read in (readers.folder, readers.requirements, readers.certificate)

    @property
    def text(self) -> str:
        return f"{self.help} [{self.default}]" if self.default else self.help


Table = Mapping[str, Field]


def _table(sections: dict[str, list[Field]]) -> Table:
    return {
        field.name: field._replace(heading=heading)
        for heading, fields in sections.items()
        for field in fields
    }


# fmt: off
JOB = _table({
    "": [
        Field("command", "COMMAND...", "", readers.command, "command",
              "The command to run, as text or as a list of words."),
    ],
    "What to run": [
        Field("name", "NAME", "", readers.name, "name",
              "A name for people."),
        Field("members", "-n N", "1", readers.members, "members members_max",
              "Processes that start together: 4, or 2..8 for an elastic gang."),
        Field("nodes", "N", "", readers.nodes, "nodes nodes_max",
              "That many nodes with one process on each: short for -n N --per-node 1."),
        Field("launcher", "", "", readers.switch, "launcher",
              "Run the command in member 0; it starts the others (mpirun, deepspeed)."),
        Field("interactive", "-i", "", readers.switch, "interactive",
              "Give it a terminal; shoal run attaches you to it."),
        Field("gpus", "-g G", "0", readers.gpus, "gpus gpu_milli gpu_memory_mb",
              "GPUs per process: 2, or 0.5 of one, or 20G of one's memory."),
        Field("gpu_memory", "SIZE", "", memory(GPU_MEMORY_MB_MAX, "40G or 80G"), "gpu_memory_mb",
              "Use only GPUs with at least this much memory, e.g. 40G."),
        Field("gpu_model", "MODEL...", "", readers.models, "gpu_models",
              "Use only GPUs of this model, e.g. H100. Several may be given."),
        Field("cpus", "C", "1", readers.cpus, "cpu_milli",
              "CPUs per process, e.g. 4 or 0.5."),
        Field("memory", "SIZE", "", memory(1_000_000_000, "512M or 4G"), "memory_mb",
              "Memory per process, e.g. 512M or 4G."),
    ],
    "Where to run it": [
        Field("within", "AREA", "anywhere", Choice("anywhere", "node", "rack", "block"), "within",
              "Keep the members in one node, rack or block if possible."),
        Field("strict", "", "", readers.switch, "within_required",
              "Wait until there is room in one such area."),
        Field("per_node", "K", "", Count(0, 16_384, "members on each node"), "members_per_node",
              "Members on each node."),
        Field("procs_per_node", "P", "1", readers.processes, "processes",
              "Processes that share the GPUs of a member: 8, or gpu for one per GPU."),
        Field("whole_nodes", "", "", readers.switch, "whole_nodes",
              "Share its nodes with no other job."),
        Field("cluster", "WHERE", "", clusters, "cluster",
              "Where it may run: any (or here), NAME (only there), price<2,region=eu (or here)."),
        Field("if_cut", "TIME", "", time("30m or 2h", least=1), "if_cut_ms",
              "Without contact for this long, its neighbor stops it, and it starts again."),
    ],
    "Which nodes": [
        Field("where", "CONDITION...", "", readers.conditions, "where",
              "Conditions on labels: key=value, key=a|b, key!=value, key or !key."),
        Field("tolerates", "TAINT...", "", readers.tolerations, "tolerates",
              "Taints that do not keep it away: key, key=value, or * for all."),
        Field("spread", "LABEL", "", readers.label, "spread",
              "Spread it as evenly as possible over the values of this label."),
        Field("together", "LABEL", "", readers.label, "together",
              "Use only nodes with the same value of this label."),
    ],
    "Sweeps and arrays": [
        Field("array", "RANGE", "", array, "sweep.ranges sweep.at_most",
              "Run it once for each index: 0-99, 0-9:3, 1,5-7; %8 adds: 8 at a time."),
        Field("grid", "NAME=VALUES...", "", grid, "sweep.grid",
              "Run it for all combinations of values: lr=0.1,0.01 and seed=1,2."),
        Field("list", "NAME=VALUES...", "", rows, "sweep.rows",
              "Run it once for each of these: lr=0.1,seed=1."),
        Field("halve", "N", "", Count(0, 16, "trials of which one goes on"), "sweep.halve",
              "Stop trials early: at each rung, only the best 1 of N goes on."),
        Field("by", "METRIC", "loss", readers.text, "sweep.by",
              "The metric that --halve compares; the lowest is the best."),
        Field("max", "", "", readers.switch, "sweep.highest",
              "The highest value of that metric is the best."),
        Field("rung", "STEP", "", Count(0, 1 << 40, "a step"), "sweep.rung",
              "The step of the first rung; without it, 1/N^2 of its steps, or 10."),
    ],
    "When to run it": [
        Field("tenant", "NAME", "default", readers.name, "tenant",
              "The account that it runs on."),
        Field("priority", "P", "0", Count(-1000, 1000, "higher goes first"), "priority",
              "Higher goes first, from -1000 to 1000."),
        Field("preemptible", "", "", readers.switch, "preemptible",
              "Let other jobs stop it; it runs again later."),
        Field("no_sleep", "", "", readers.switch, "no_sleep",
              "Never put it to sleep; if it must make room, it is stopped instead."),
        Field("checkpoint_every", "TIME", "", time("90s, 10m or 2h", least=1), "checkpoint_ms",
              "How often it saves its work, e.g. 10m."),
        Field("estimate", "TIME", "", time("90s, 10m or 2h", least=1), "estimate_ms",
              "How long it will probably run, e.g. 2h."),
        Field("time_limit", "TIME", "", time("90s, 10m or 2h", least=1), "time_limit_ms",
              "Stop it after this long: 90s, 10m, 2h, 1d."),
    ],
    "Find it, and hear of it": [
        Field("label", "K=V...", "", readers.labels, "labels",
              "A label for people, e.g. run=a; shoal ps --label run=a finds it."),
        Field("notify", "[WHAT=]WHERE...", "", readers.wishes, "notify",
              "Send a notice: failed=URL, slack:URL, mail:me@example.com or @SECRET."),
    ],
    "Dependencies": [
        Field("after", "JOB[:WHEN]...", "", after, "after",
              "Start it when this job has succeeded, or ended (:any), or failed (:fail)."),
        Field("begin", "TIME", "", begin, "begin_ms",
              "Do not start it before: 'in 2h', 03:00, '2026-11-17 03:00'."),
    ],
    "If it fails or has to stop": [
        Field("restart", "WHEN", "on-node-loss", Choice("never", "on-node-loss", "on-failure"),
              "restart", "Run it again: never, on-node-loss or on-failure."),
        Field("retries", "N", "0", Count(0, 1000, "times it may fail and run again"), "retries",
              "How often it may fail and run again. Sets restart to on-failure."),
        Field("backoff", "TIME", "1s", time("90s, 10m or 2h"), "backoff_ms",
              "The pause before the first retry. It doubles each time."),
        Field("stop_grace", "TIME", "10s", time("10s or 2m", 3_600_000), "stop_grace_ms",
              "The time from SIGTERM to SIGKILL."),
    ],
    "Its environment": [
        Field("env", "K=V...", "", readers.environment, "env",
              "Variables of the job. K alone copies its value from here."),
        Field("secret", "NAME[=VARIABLE]...", "", readers.secrets, "secrets",
              "A secret of the tenant: as a file in $SHOAL_SECRETS, or in a variable. NAME=/FILE: "
              "in a file of that name."),
        Field("volume", "SOURCE:NAME[:ro]...", "", volumes, "volumes",
              "A folder that its nodes have, or a URL that they fetch, in $SHOAL_VOLUME_NAME."),
        Field("volume_shard", "NAME...", "", volume_names, "volume_shard",
              "Give each member only its share of the files of this volume from a URL."),
        Field("volume_lazy", "NAME...", "", volume_names, "volume_lazy",
              "Start at once; shoal.data fetches the files of this volume from a URL as it reads."),
        Field("encrypt", "", "", readers.switch, "encrypt",
              "Encrypt kept files and checkpoints before they leave a node."),
        Field("encrypt_network", "", "", readers.switch, "encrypt_network",
              "Encrypt what members on different nodes send each other."),
        Field("image", "IMAGE", "", readers.image, "image",
              "Run it in a container of this image."),
        Field("workdir", "DIR", "the current directory", readers.folder, "workdir",
              "The folder to run in."),
        Field("requirements", "FILE", "", readers.requirements, "requirements",
              "pip requirements file to install for the job."),
        Field("pack", "", "if nodes are other machines", readers.switch, "",
              "Send the folder to the nodes."),
    ],
})

# What a form shows first; the other fields are behind a fold.
COMMON = (
    "command", "name", "members", "gpus", "cpus", "memory", "time_limit", "env", "workdir", "image",
    "tenant", "priority", "grid",
)

# A replica runs until it is stopped, and is never resized: other fields of a job do not apply.
REPLICA = (
    "members", "nodes", "gpus", "gpu_memory", "gpu_model", "cpus", "memory", "within", "strict",
    "per_node", "procs_per_node", "whole_nodes", "where", "tolerates", "spread", "together",
    "tenant", "priority", "no_sleep", "stop_grace", "env", "secret", "volume", "image", "workdir",
    "requirements", "pack",
)
ROUTES = ("least-loaded", "p2c", "prefix", "sticky", "cache")
SERVICE_PRIORITY = 100  # a request should wait less than a training run

SERVICE = _table({
    "": [
        Field("name", "NAME", "", readers.service_name, "name",
              "The service's name. It is part of the URL."),
        JOB["command"],
    ],
    "Replicas": [
        Field("replicas", "N", "1", readers.replicas, "scale.least scale.most",
              "2, or 1..8 to follow the load, or 0..4 to scale to zero when idle."),
        Field("target", "N", "8", Count(1, 100_000, "requests at a replica at a time"),
              "scale.target", "Requests at each replica to aim for."),
        Field("idle", "TIME", "5m", time("5m or 30s", DAY_MS, 1), "scale.idle_ms",
              "Scale to zero after this long without requests."),
        Field("sleep_after", "TIME", "", time("10m or 30s", DAY_MS, 1), "sleep_after_ms",
              "Put the last replica to sleep after this long without requests. The next one wakes"
              " it."),
        Field("probe", "PATH", "/", readers.probe, "probe.path probe.models",
              "A replica is ready when this path answers with a status below 500, or, with openai,"
              " when /v1/models lists a model."),
        Field("ready_within", "TIME", "10m", time("10m or 90s", DAY_MS, 1), "probe.start_ms",
              "Replace a replica that is not ready after this long."),
        Field("probe_every", "TIME", "10s", time("10s or 1m", DAY_MS, 1), "probe.every_ms",
              "How often to probe a ready replica that has requests and answers none."),
        Field("probe_failures", "N", "6", Count(1, 1_000, "probes without an answer"),
              "probe.failures", "Replace a replica after this many probes without an answer."),
        Field("drain", "TIME", "60s", time("60s or 10m", DAY_MS, 1), "drain_ms",
              "The time that a stopping replica has to finish its requests."),
        Field("rollout", "HOW", "surge", Choice("surge", "replace"), "rollout",
              "Start new replicas before the old ones leave, or, with replace, after them if there"
              " is no room for both."),
        Field("at_a_time", "N", "0", Count(0, 10_000, "replicas that change at a time"),
              "at_a_time", "Replicas that a roll-out replaces at a time. 0: a quarter of them."),
        Field("clusters", "NAME...", "", readers.clusters, "clusters",
              "Serve it at these neighbors, too, each with replicas of its own:"
              " here,west,south."),
    ],
    "Requests": [
        Field("route", "HOW", "least-loaded", Choice(*ROUTES), "route.routing",
              "How to choose a replica: least-loaded, p2c, prefix or sticky; or, with cache, for a"
              " language model, by the tokens that it has to read."),
        Field("sticky_header", "H", "", readers.header, "route.sticky_header",
              "Send requests with the same header value to the same replica."),
        Field("sticky_cookie", "C", "", readers.header, "route.sticky_cookie",
              "Send requests with the same cookie value to the same replica."),
        Field("queue", "N", "1000", Count(1, 100_000, "requests that may wait"), "route.queue_max",
              "Requests that may wait. More get status 503."),
        Field("rate", "N", "", Count(1, 1_000_000, "requests per second of a tenant"),
              "route.rate_per_s", "Requests per second from one tenant. More get status 429."),
        Field("path", "PATH", "", readers.url_path, "route.path",
              "Serve it at this path instead of /NAME. Gradio and uvicorn learn of it by"
              " GRADIO_ROOT_PATH and UVICORN_ROOT_PATH."),
        Field("host", "NAME", "", readers.host, "route.host",
              "Serve it at this host name, too, on the port that all services share."),
        Field("port", "P", "", Count(1, 65_535, "a port of its own"), "route.port",
              "Serve it on a port of its own, too."),
        Field("certificate", "PEM", "", readers.certificate, "route.certificate",
              "Use TLS on that port: a PEM file with the certificate and its key, which becomes a"
              " secret, or the name of such a secret."),
        Field("access", "WHO...", "", readers.access, "route.access",
              "Who may call: open, cluster (with a token or a key), or tenants. Without it, open;"
              " for a service of an added tenant, cluster."),
    ],
    "Language models (route: cache)": [
        Field("ttft", "TIME", "", time("500ms or 2s", 3_600_000, 1), "goals.ttft_ms",
              "The goal for the time until the first token."),
        Field("itl", "TIME", "", time("50ms", 60_000, 1), "goals.itl_ms",
              "The goal for the time between two tokens, in the mean of an answer."),
        Field("goodput", "SHARE", "0.99", readers.share, "goals.share_milli",
              "The share of requests that should meet these goals."),
        Field("adapters", "DIR|URL", "", readers.text, "adapters",
              "LoRA adapters, each a folder there; the model in a request names one."),
        Field("adapters_max", "N", "0", Count(0, 1_000, "adapters"), "adapters_max",
              "Adapters that a replica has loaded at a time. 0: as many as it takes."),
    ],
    "Each replica": [JOB[name] for name in REPLICA],
})
# fmt: on
SERVICE = {
    **SERVICE,
    "priority": SERVICE["priority"]._replace(default=str(SERVICE_PRIORITY)),
    "members": SERVICE["members"]._replace(help="Processes of a replica, which start together."),
}


def read_all(table: Table, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `given`, by the names that they set in the spec."""
    ready: dict[str, Any] = {}
    for name, value in given.items():
        field = table[name]
        found = field.read(name, value)
        targets = field.targets.split()
        ready.update(zip(targets, found if len(targets) > 1 else (found,), strict=False))
    return ready
