"""Services: their replicas, roll-outs, sleep, and what they may have of the gateway."""
