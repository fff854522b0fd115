#!/usr/bin/env python3
"""Asks the cloud's metadata service every few seconds whether it will take this machine away.

If so, it runs `shoal ends --in 110s --why "AWS spot notice"`, and jobs save and move while there is
time. It knows the notices of AWS (two minutes ahead), Google (30 seconds) and Azure (30 seconds and
more), and needs nothing but Python. On a machine of none of these clouds it ends at once.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable

BASE = os.environ.get("METADATA", "http://169.254.169.254")
SHOAL = os.environ.get("SHOAL", "/opt/shoal/bin/shoal")
LOOK_S = float(os.environ.get("LOOK_S", "5"))
ANSWER_S = 2.0
GOOGLE_S = 30  # what Google gives; it does not say how much is left
NONE_S = 60 * 60  # how long to look for a cloud after a boot

Notice = tuple[int, str]  # seconds left, and why


def ask(path: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """None: there is nothing of this name."""
    request = urllib.request.Request(BASE + path, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return str(answer.read(65536).decode())
    except urllib.error.HTTPError:
        return None


def seconds_until(moment: str) -> int:
    """`2026-11-16T08:22:00Z`, or as Azure writes it, `Mon, 16 Nov 2026 08:22:00 GMT`."""
    form = "%Y-%m-%dT%H:%M:%SZ" if moment.endswith("Z") else "%a, %d %b %Y %H:%M:%S %Z"
    then = datetime.datetime.strptime(moment, form).replace(tzinfo=datetime.UTC)
    return max(0, int(then.timestamp() - time.time()))


def aws() -> Notice | None:
    life = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = ask("/latest/api/token", life, "PUT")
    said = ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token or ""})
    if not said:
        return None
    notice = json.loads(said)
    return seconds_until(notice["time"]), f"AWS spot notice: {notice['action']}"


def google() -> Notice | None:
    said = ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return (GOOGLE_S, "Google spot notice") if said and said.strip() == "TRUE" else None


def azure() -> Notice | None:
    ours = {"Metadata": "true"}
    said = ask("/metadata/scheduledevents?api-version=2020-07-01", ours)
    name = ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", ours)
    for event in json.loads(said or "{}").get("Events", []):
        kind, moment = event.get("EventType", ""), event.get("NotBefore", "")
        if kind in ("Preempt", "Terminate", "Redeploy") and name in event.get("Resources", []):
            return seconds_until(moment) if moment else 0, f"Azure notice: {kind}"
    return None


def cloud() -> Callable[[], Notice | None] | None:
    """Which cloud this is. A metadata service may answer late after a boot."""
    marks: dict[Callable[[], Notice | None], tuple[str, dict[str, str], str]] = {
        aws: ("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT"),
        google: ("/computeMetadata/v1/instance/id", {"Metadata-Flavor": "Google"}, "GET"),
        azure: ("/metadata/instance?api-version=2021-02-01", {"Metadata": "true"}, "GET"),
    }
    for notices, mark in marks.items():
        if ask(*mark):
            return notices
    return None


def say(notice: Notice) -> bool:
    left_s, why = notice
    print(f"{why}, in {left_s} s", flush=True)
    command = [SHOAL, "ends", "--in", f"{max(1, left_s)}s", "--why", why]
    return subprocess.run(command, check=False).returncode == 0


def main() -> int:
    look: Callable[[], Notice | None] | None = None
    until = time.monotonic() + NONE_S
    while True:
        try:
            look = look or cloud()
            if look is None:
                print("no cloud that gives notices answers here", flush=True)
                return 0
            notice = look()
            if notice is not None and say(notice):
                return 0
        except (OSError, ValueError, KeyError) as error:
            if look is None and time.monotonic() > until:
                print(f"no metadata service answers: {error}", flush=True)
                return 0
        time.sleep(LOOK_S)


if __name__ == "__main__":
    raise SystemExit(main())
