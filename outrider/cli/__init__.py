"""The command line `outrider`: start services, send requests, check the machine. Its entry point is `app`."""
