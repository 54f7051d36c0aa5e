"""The truth: holds the target model, checks guesses, commits tokens."""
