"""Requests of inference engines that serve their own clients: drafters here guess, the engines verify."""
