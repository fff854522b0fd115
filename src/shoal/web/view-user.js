// A user: what ran, what it cost and what was wasted, in one tenant or in all.

import { chosen } from "./address.js";
import { people } from "./people.js";

export function mount(root, name) {
  const tenant = chosen("tenant");
  return people(root, "user", name, { user: name, ...(tenant ? { tenant } : {}) }, ["account", "job"]);
}
