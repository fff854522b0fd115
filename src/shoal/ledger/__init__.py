"""The ledger: where every GPU-millisecond of every node went, in accounts that add up exactly."""
