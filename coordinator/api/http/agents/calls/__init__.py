"""Forms of tool calls: how each family of models writes them, as data, and how their arguments become JSON."""
