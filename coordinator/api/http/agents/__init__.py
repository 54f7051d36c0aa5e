"""API for agents: chats with tools, their answers in parts, and texts as tokens."""
