"""Running a service: listen, report health, register, drain."""
