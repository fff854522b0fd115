"""How heads, agents and clients talk: frames, websockets, and connections through the head."""
