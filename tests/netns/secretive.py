"""A member: each says the same words to the first, and hears them, at the gang's meeting point."""

import os
import socket
import time

WORDS = b"attack at dawn, says the member"
TIMES = 200

place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    with socket.create_server(("", place[1]), family=family) as server:
        lines = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
else:
    while True:
        try:
            lines = [socket.create_connection(place, timeout=5)]
            break
        except OSError:
            time.sleep(0.1)
for line in lines:
    with line:
        line.sendall(WORDS * TIMES)
        heard = b""
        while len(heard) < len(WORDS) * TIMES:
            heard += line.recv(1 << 16)
    assert heard == WORDS * TIMES
print(place, "heard", flush=True)
