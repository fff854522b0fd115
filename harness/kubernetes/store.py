"""The objects of the tests' API server, with versions, finalizers and owners as in Kubernetes."""

from __future__ import annotations

import asyncio
import calendar
import copy
import time
import uuid
from typing import Any, NamedTuple

Object = dict[str, Any]

KINDS = {
    "pods": ("v1", "Pod"),
    "secrets": ("v1", "Secret"),
    "configmaps": ("v1", "ConfigMap"),
    "events": ("v1", "Event"),
    "nodes": ("v1", "Node"),
    "namespaces": ("v1", "Namespace"),
    "resourcequotas": ("v1", "ResourceQuota"),
    "limitranges": ("v1", "LimitRange"),
    "serviceaccounts": ("v1", "ServiceAccount"),
}
CLUSTER_WIDE = ("nodes", "namespaces")
ACCOUNT_S = 0.05  # until a new namespace has its service account
BUILT_IN = ("system-cluster-critical", "system-node-critical")  # priority classes


class ApiError(Exception):
    def __init__(self, code: int, reason: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.headers = code, reason, message, headers

    def status(self) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Status",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }


class Change(NamedTuple):
    version: int
    resource: str
    before: Object | None
    after: Object | None  # None: deleted; `before` then has the version of the deletion


def stamp(at_s: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))


class Store:
    """All calls are made on the server's loop."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[tuple[str, str], Object]] = {name: {} for name in KINDS}
        self.version = 1000
        self.floor = 1000  # changes up to here are forgotten
        self.history: list[Change] = []
        self.news = asyncio.Event()

    # -- reading ---------------------------------------------------------------------------

    def get(self, resource: str, namespace: str, name: str) -> Object:
        found = self.objects[resource].get((namespace, name))
        if found is None:
            raise ApiError(404, "NotFound", f'{resource} "{name}" not found')
        return found

    def all(self, resource: str, namespace: str = "") -> list[Object]:
        return [
            one
            for (space, _), one in sorted(self.objects[resource].items())
            if not namespace or space == namespace
        ]

    # -- writing ---------------------------------------------------------------------------

    def create(self, resource: str, namespace: str, new: Object) -> Object:
        api, kind = KINDS[resource]
        if (new.get("apiVersion"), new.get("kind")) != (api, kind):
            raise ApiError(400, "BadRequest", f"the object is not a {api} {kind}")
        name = new["metadata"].get("name", "")
        if resource not in CLUSTER_WIDE and ("", namespace) not in self.objects["namespaces"]:
            raise ApiError(404, "NotFound", f'namespaces "{namespace}" not found')
        if (namespace, name) in self.objects[resource]:
            raise ApiError(409, "AlreadyExists", f'{resource} "{name}" already exists')
        made = copy.deepcopy(new)
        if resource not in CLUSTER_WIDE:
            made["metadata"]["namespace"] = namespace
        made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": stamp()}
        if resource == "pods":
            self._admit(namespace, made)
            made["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        self._put(resource, None, made)
        if resource == "namespaces":
            asyncio.get_running_loop().call_later(ACCOUNT_S, self._add_account, name)
        return made

    def _add_account(self, namespace: str) -> None:
        if ("", namespace) in self.objects["namespaces"]:
            account = {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": "default"},
            }
            self.create("serviceaccounts", namespace, account)

    def replace(self, resource: str, namespace: str, name: str, new: Object, part: str) -> Object:
        """A PUT. With a resourceVersion, only if nobody else has written meanwhile."""
        old = self.get(resource, namespace, name)
        said = new["metadata"].get("resourceVersion")
        if said and said != old["metadata"]["resourceVersion"]:
            raise ApiError(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on {resource} "{name}": the object has been '
                "modified; please apply your changes to the latest version and try again",
            )
        return self._change(resource, old, new, part)

    def patch(self, resource: str, namespace: str, name: str, patch: Object, part: str) -> Object:
        old = self.get(resource, namespace, name)
        return self._change(resource, old, merged(old, patch), part)

    def _change(self, resource: str, old: Object, new: Object, part: str) -> Object:
        after = copy.deepcopy(old)
        if part == "status":
            after["status"] = copy.deepcopy(new.get("status", {}))
        else:
            status = after.get("status")
            after = copy.deepcopy(new)
            if status is not None:
                after["status"] = status
            if resource == "pods" and after.get("spec") != old.get("spec"):
                raise ApiError(422, "Invalid", "spec: Forbidden: pod updates may not change fields")
        for field in ("uid", "creationTimestamp", "deletionTimestamp"):
            if field in old["metadata"]:
                after["metadata"][field] = old["metadata"][field]
        self._put(resource, old, after)
        meta = after["metadata"]
        ends = "deletionTimestamp" in meta and not meta.get("finalizers")
        if ends and not meta.get("deletionGracePeriodSeconds"):  # else its kubelet deletes it
            self._remove(resource, after)
        return after

    def delete(self, resource: str, namespace: str, name: str, options: Object) -> Object:
        old = self.get(resource, namespace, name)
        uid = (options.get("preconditions") or {}).get("uid")
        if uid and uid != old["metadata"]["uid"]:
            raise ApiError(409, "Conflict", f"the UID in the precondition ({uid}) is another")
        if resource == "pods" and self._end_gracefully(old, options.get("gracePeriodSeconds")):
            return self.get(resource, namespace, name)
        if old["metadata"].get("finalizers"):
            if "deletionTimestamp" not in old["metadata"]:
                after = copy.deepcopy(old)
                after["metadata"] |= {"deletionTimestamp": stamp(), "deletionGracePeriodSeconds": 0}
                self._put(resource, old, after)
            return self.get(resource, namespace, name)
        self._remove(resource, old)
        return old

    def _end_gracefully(self, pod: Object, asked: int | None) -> bool:
        """A pod on a machine is deleted by its kubelet, at the end of the grace period."""
        grace = pod["spec"].get("terminationGracePeriodSeconds", 30) if asked is None else asked
        over = pod["status"].get("phase") in ("Succeeded", "Failed")
        if grace == 0 or over or not pod["spec"].get("nodeName"):
            return False
        if "deletionTimestamp" not in pod["metadata"]:
            after = copy.deepcopy(pod)
            after["metadata"] |= {
                "deletionTimestamp": stamp(time.time() + grace),
                "deletionGracePeriodSeconds": grace,
            }
            self._put("pods", pod, after)
        return True

    def bind(self, namespace: str, name: str, machine: str) -> None:
        old = self.get("pods", namespace, name)
        if old["spec"].get("nodeName"):
            raise ApiError(409, "Conflict", f"pod {name} is already assigned to a node")
        after = copy.deepcopy(old)
        after["spec"]["nodeName"] = machine
        set_condition(after, "PodScheduled", "True")
        self._put("pods", old, after)

    def evict(self, namespace: str, name: str, options: Object) -> None:
        old = self.get("pods", namespace, name)
        after = copy.deepcopy(old)
        text = "Eviction API: evicting"
        set_condition(after, "DisruptionTarget", "True", "EvictionByEvictionAPI", text)
        self._put("pods", old, after)
        self.delete("pods", namespace, name, options)

    def forget(self) -> None:
        """As a compaction does: watches from before this point get 410 Gone."""
        self.floor = self.version
        self.history = []

    # -- inside ----------------------------------------------------------------------------

    def restore(self) -> None:
        """As from a backup of etcd: versions begin again before those that were given out."""
        self.version, self.floor, self.history = 1000, 1000, []

    def _admit(self, namespace: str, pod: Object) -> None:
        """The admission plugins of a real one, in its words; each refuses with 403."""
        spec = pod["spec"]
        refused = f'pods "{pod["metadata"]["name"]}" is forbidden: '
        account = spec.get("serviceAccountName", "default")
        if (namespace, account) not in self.objects["serviceaccounts"]:
            found = f'serviceaccount "{account}" not found'
            text = f"error looking up service account {namespace}/{account}: {found}"
            raise ApiError(403, "Forbidden", refused + text)
        priority = spec.get("priorityClassName", "")
        if priority and priority not in BUILT_IN:
            text = f"no PriorityClass with name {priority} was found"
            raise ApiError(403, "Forbidden", refused + text)
        labels = self.objects["namespaces"][("", namespace)]["metadata"].get("labels") or {}
        if labels.get("pod-security.kubernetes.io/enforce") == "restricted":
            for wrong in unrestricted(spec):
                text = f'violates PodSecurity "restricted:latest": {wrong}'
                raise ApiError(403, "Forbidden", refused + text)
        for limits in self.all("limitranges", namespace):
            for item in limits["spec"]["limits"]:
                for what, most in (item.get("max") or {}).items():
                    asked = spec["containers"][0].get("resources", {}).get("limits", {}).get(what)
                    if asked is not None and int(asked) > int(most):
                        text = f"maximum {what} usage per Container is {most}, but limit is {asked}"
                        raise ApiError(403, "Forbidden", refused + text)
        self._check_quota(namespace, pod)

    def _check_quota(self, namespace: str, pod: Object) -> None:
        for quota in self.all("resourcequotas", namespace):
            hard = quota["spec"]["hard"]
            wanted = counted(pod)
            for name, limit in hard.items():
                used = sum(counted(one).get(name, 0) for one in self.all("pods", namespace))
                if used + wanted.get(name, 0) > int(limit):
                    raise ApiError(
                        403,
                        "Forbidden",
                        f'pods "{pod["metadata"]["name"]}" is forbidden: exceeded quota: '
                        f"{quota['metadata']['name']}, requested: {name}={wanted[name]}, "
                        f"used: {name}={used}, limited: {name}={limit}",
                    )

    def _put(self, resource: str, before: Object | None, after: Object) -> None:
        self.version += 1
        after["metadata"]["resourceVersion"] = str(self.version)
        key = (after["metadata"].get("namespace", ""), after["metadata"]["name"])
        self.objects[resource][key] = after
        self._note(Change(self.version, resource, before, after))
        owners = after["metadata"].get("ownerReferences")
        if before is None and owners:
            self._collect(resource, after)

    def _remove(self, resource: str, old: Object) -> None:
        self.version += 1
        gone = copy.deepcopy(old)
        gone["metadata"]["resourceVersion"] = str(self.version)
        key = (old["metadata"].get("namespace", ""), old["metadata"]["name"])
        self.objects[resource].pop(key, None)
        self._note(Change(self.version, resource, gone, None))
        for kind in self.objects:
            for one in self.all(kind):
                if any(
                    owner["uid"] == old["metadata"]["uid"]
                    for owner in one["metadata"].get("ownerReferences") or ()
                ):
                    self._collect(kind, one)

    def _collect(self, resource: str, found: Object) -> None:
        """Deletes what has no owner any more."""
        uids = {one["metadata"]["uid"] for kind in self.objects for one in self.all(kind)}
        if not any(one["uid"] in uids for one in found["metadata"]["ownerReferences"]):
            self.delete(resource, found["metadata"]["namespace"], found["metadata"]["name"], {})

    def _note(self, change: Change) -> None:
        self.history.append(change)
        self.news.set()
        self.news = asyncio.Event()


def merged(old: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    found = copy.deepcopy(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


def set_condition(pod: Object, kind: str, status: str, reason: str = "", message: str = "") -> None:
    conditions = pod["status"].setdefault("conditions", [])
    new = {"type": kind, "status": status, "lastTransitionTime": stamp()}
    new |= {"reason": reason} if reason else {}
    new |= {"message": message} if message else {}
    conditions[:] = [one for one in conditions if one["type"] != kind] + [new]


def unrestricted(spec: Object) -> list[str]:
    """What of a pod the restricted Pod Security Standard forbids, as far as a supply can ask for
    it."""
    wrong = ["host namespaces (hostNetwork=true)"] if spec.get("hostNetwork") else []
    context = spec.get("securityContext") or {}
    if not context.get("runAsNonRoot"):
        wrong.append("runAsNonRoot != true (pod or containers must set it to true)")
    wrong += [
        f'restricted volume types (volume "{volume["name"]}" uses a restricted type "hostPath")'
        for volume in spec.get("volumes") or ()
        if "hostPath" in volume
    ]
    return wrong


def counted(pod: Object) -> dict[str, int]:
    """What a quota counts of a pod that is not over."""
    if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return {}
    found = {"pods": 1, "count/pods": 1}
    for container in pod["spec"]["containers"]:
        for name, amount in (container.get("resources", {}).get("requests") or {}).items():
            if "/" in name:
                found[f"requests.{name}"] = found.get(f"requests.{name}", 0) + int(amount)
    return found


def seconds(text: str) -> float:
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
