"""How a command that starts processes by itself, such as mpirun, reaches the other members."""
