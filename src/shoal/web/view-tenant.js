// A tenant: its budget, what ran, what it cost and what was wasted, by user and by job.

import { people } from "./people.js";

export const mount = (root, name) => people(root, "tenant", name, { tenant: name }, ["account", "user", "job"]);
