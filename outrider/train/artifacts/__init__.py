"""Trained drafters: their modules, and the folder that stores them."""
