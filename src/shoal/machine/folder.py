"""The files in a node's folder, HOME/nodes/NAME, that several of its programs read or write."""

from __future__ import annotations

SPEC = "spec.json"
LINK_FILE = "link.json"  # where its agent dials the head; without it, the agent listens
LINK_PROBLEM = "link.problem"  # one line, while the head cannot be reached
CONTACT = "contact"  # written when a controller has spoken to the agent
LEAVING = "leaving"  # exists when the node wants to leave
STARTER_LOCK = "starter.lock"
AGENT_LOCK = "agent.lock"  # free only when every process of the node is gone
FORMAT_FILE = "format.json"  # which version has written to it
