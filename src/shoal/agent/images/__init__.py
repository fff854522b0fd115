"""Members in containers: what runs images on this node, how it is called, and what it leaves."""
