"""The worker pool: who is there, how loaded, how trusted."""
