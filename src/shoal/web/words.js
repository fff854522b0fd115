// Describes an event in a few words; its reason is shown beside it.

import { plural, span } from "./dom.js";

const nodes = (slices) => [...new Set((slices ?? []).map((slice) => (Array.isArray(slice) ? slice[0] : slice.node)))].join(", ");
const CAUSES = { cancel: "cancelled", "time-limit": "out of time", failure: "failed", "node-loss": "lost a node", drain: "its node is drained", preempt: "makes room for another job", resize: "changes its size", move: "moves elsewhere", hang: "hangs" };

const WORDS = {
  JobSubmitted: () => "submitted",
  JobReleased: (e) => `no longer waits for ${e.by}`,
  JobPlaced: (e) => `attempt ${e.attempt} placed on ${nodes(e.slices)}`,
  JobReserved: (e) => (e.start_ms ? `reserved room on ${e.nodes.join(", ")} in ${span(e.start_ms - e.at_ms)}` : "room reserved for it"),
  JobClaimed: (e) => `making room on ${nodes(e.slices)}`,
  JobUnclaimed: () => "no longer needs the room made for it",
  JobPromoted: () => "moved to the front of the queue",
  MembersStarted: (e) => `${plural(e.members?.length ?? 0, "member")} started`,
  JobRunning: (e) => `attempt ${e.attempt} running`,
  MemberExited: (e) => `member ${e.member} on ${e.node} exited ${e.code}`,
  MemberLost: (e) => `member ${e.member} lost with ${e.node}`,
  JobCheckpointed: (e) => `saved up to step ${e.step}`,
  JobStopping: (e) => `stopping: ${CAUSES[e.cause] ?? e.cause}`,
  JobRequeued: (e) => `waiting again: ${CAUSES[e.cause] ?? e.cause}`,
  JobAdopted: (e) => `found alive on ${e.node}`,
  JobIdled: (e) => `idle for ${span(e.at_ms - e.since_ms)}`,
  JobUsed: () => "in use again",
  JobLabelled: () => "labels changed",
  JobNoted: (e) => (e.text ? `note${e.who ? ` by ${e.who}` : ""}: ${e.text}` : "notes removed"),
  JobWaited: (e) => `has waited for ${span(e.waited_ms)}`,
  ArraySubmitted: () => "submitted as an array",
  ArrayCancelled: () => "no further element begins",
  ArrayRetried: (e) => (e.index === null || e.index === undefined ? "elements without success run again" : `element ${e.index} runs again`),
  ArrayFinished: (e) => `${e.outcome}, all elements have ended`,
  JobFinished: (e) => `${e.outcome}, code ${e.code}`,
};

const OTHERS = {
  NodeJoined: (e) => `${e.node} joined`,
  NodeReady: (e) => `${e.node} is ready`,
  NodeSilent: (e) => `${e.node} is silent`,
  NodeLost: (e) => `${e.node} is lost`,
  NodeIntended: (e) => `${e.node} is ${e.intent}`,
  NodeEnding: (e) => e.end ? `${e.node} ${e.why}` : `${e.node} no longer ends`,
  NodeLabelled: (e) => `${e.node} was ${e.why || "labelled"}`,
  NodeChecked: (e) => `${e.node} was checked: ${e.passed ? "passed" : "failed"}`,
  NodeJudged: (e) => `${e.node} is ${e.record?.standing}`,
  ServiceSet: (e) => `service ${e.service} is version ${e.version}`,
  ServiceScaled: (e) => `service ${e.service} wants ${plural(e.wanted, "replica")}`,
  ReplicaReady: (e) => `${e.job} is a ready replica of ${e.service}`,
  ReplicaDraining: (e) => `${e.job} is draining from ${e.service}`,
  ServiceStopping: (e) => `service ${e.service} is stopping`,
  ServiceStopped: (e) => `service ${e.service} has stopped`,
  PolicyChanged: (e) => `the policy is ${e.policy?.name}`,
  ScheduleSet: (e) => `schedule ${e.spec?.name} is ${e.spec?.cron}`,
  ScheduleRan: (e) => `schedule ${e.schedule} ran as ${e.job}`,
  ScheduleMissed: (e) => `schedule ${e.schedule} missed ${plural(e.count, "run")}`,
  ScheduleSkipped: (e) => `schedule ${e.schedule} left out a run`,
  SchedulePaused: (e) => `schedule ${e.schedule} is paused`,
  ScheduleResumed: (e) => `schedule ${e.schedule} goes on`,
  ScheduleRemoved: (e) => `schedule ${e.schedule} was removed`,
  RuleSet: (e) => `notice rule ${e.rule?.id} of ${e.tenant} was set`,
  RuleRemoved: (e) => `notice rule ${e.rule} of ${e.tenant} was removed`,
  BudgetWarned: (e) => `budget of ${e.tenant}: a warning`,
  BudgetHeld: (e) => `budget of ${e.tenant} is spent: its jobs wait`,
  BudgetFreed: (e) => `budget of ${e.tenant}: its jobs may start again`,
  NodesOrdered: (e) => `${plural(e.nodes?.length ?? 0, "node")} ordered from ${e.supply}`,
  OrderChanged: (e) => `order ${e.order} is ${e.phase}`,
  OrderEnded: (e) => `order ${e.order} has ended`,
  KeySet: (e) => (e.key?.node ? `the key of ${e.key.node} was set` : "a join token was set"),
  KeyRemoved: (e) => `key ${e.key} was removed`,
  ClockJumped: (e) => e.why,
  TenantAdded: (e) => `tenant ${e.tenant?.name} was added`,
  TenantRemoved: (e) => `tenant ${e.tenant} was removed`,
  UserSet: (e) => `user ${e.user?.name} was set`,
  UserRemoved: (e) => `user ${e.user} was removed`,
  TokenSet: (e) => `token ${e.token?.id} of ${e.token?.user} was set`,
  TokenRemoved: (e) => `token ${e.token} was removed`,
  ClusterRestored: (e) => `restored from a backup: new jobs begin at j${e.first_job}`,
  ControllerStarted: (e) => `controller start ${e.epoch}`,
};

/** For a list of all events: with the name of the job. */
export const describe = (event) => (OTHERS[event.event] ? OTHERS[event.event](event) : `${event.job} ${say(event)}`);
export const say = (event) => (WORDS[event.event] ?? (() => event.event))(event);
