"""Hidden states of a session: buffered until a verdict carries them."""
