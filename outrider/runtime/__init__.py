"""Runtime of the services: listen, report health, register, drain."""
