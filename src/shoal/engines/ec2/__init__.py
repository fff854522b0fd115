"""Amazon EC2 brings the nodes: Shoal's agents run on instances of our own (docs/ec2.md)."""
