"""Harmony, the format of gpt-oss's answers and histories."""
