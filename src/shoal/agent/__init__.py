"""What runs on a node: starts members, watches them, reports them, ships their output."""
