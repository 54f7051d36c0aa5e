"""Hidden states at the coordinator: kept for drafters that are attached later."""
