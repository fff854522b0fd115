"""Everything that can happen, each kind in one declaration; only these change the facts."""
