// The columns of the list of jobs, made from model/columns.py by `make generate`.

/** @typedef {[name: string, heading: string, kind: string, field: string, sort: string,
 *   width: string, also: string]} Column */

export const TABLE = /** @type {Column[]} */ ([
  ["id", "Job", "text", "id", "name", "minmax(150px, 1.6fr)", "job"],
  ["name", "Name", "text", "name", "name", "minmax(70px, .7fr)", ""],
  ["state", "State", "text", "state", "state", "104px", ""],
  ["user", "User", "text", "user", "user", "minmax(60px, .6fr)", ""],
  ["tenant", "Tenant", "text", "tenant", "tenant", "minmax(60px, .6fr)", ""],
  ["shape", "Size", "text", "", "gpus", "84px", "size"],
  ["gpus", "GPUs", "number", "", "gpus", "72px", ""],
  ["gpu_use", "GPU use", "number", "", "", "72px", ""],
  ["gpu_memory", "GPU memory", "number", "", "", "92px", ""],
  ["why", "Status", "text", "why", "", "minmax(140px, 3fr)", ""],
  ["progress", "Progress", "text", "", "", "minmax(140px, 1.5fr)", ""],
  ["nodes", "Nodes", "text", "", "", "minmax(70px, .8fr)", ""],
  ["cluster", "Cluster", "text", "", "cluster", "minmax(70px, .7fr)", ""],
  ["time", "Run time", "duration", "", "time", "76px", ""],
  ["submitted", "Submitted", "moment", "submitted_ms", "submitted", "92px", ""],
  ["started", "Started", "moment", "running_ms", "started", "92px", ""],
  ["ended", "Ended", "moment", "finished_ms", "ended", "92px", ""],
  ["try", "Attempts", "number", "attempt", "attempts", "64px", "attempts"],
  ["priority", "Priority", "number", "priority", "priority", "72px", ""],
  ["code", "Exit code", "number", "code", "", "72px", ""],
  ["service", "Service", "text", "service", "", "minmax(70px, .7fr)", ""],
  ["labels", "Labels", "text", "", "", "minmax(90px, 1fr)", ""],
  ["command", "Command", "text", "command", "", "minmax(120px, 2fr)", ""],
]);
