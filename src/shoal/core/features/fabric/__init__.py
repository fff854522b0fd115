"""The network between nodes: tours that measure it, which links are weak, which nodes are near."""
