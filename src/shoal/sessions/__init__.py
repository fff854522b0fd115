"""Into a running job: processes, terminals and connections, through the head (ADR 48)."""

from shoal.sessions.session import Forward, forward

__all__ = ["Forward", "forward"]
