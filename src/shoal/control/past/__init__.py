"""The cluster's past: bars (who held which GPUs, and why that ended) and moments (the state)."""
