"""Who may begin: quotas of API keys, seats at verifiers."""
