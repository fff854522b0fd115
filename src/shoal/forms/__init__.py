"""What people write: job, service, policy, price and host files, flags, units; read and checked."""
