"""Many machines: Ray carries messages between the controller and the agents, and nothing else."""
