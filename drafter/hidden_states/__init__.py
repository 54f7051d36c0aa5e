"""Hidden states that a drafter declares to read."""
