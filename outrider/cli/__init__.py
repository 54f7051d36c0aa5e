"""The command line `outrider`: start it, talk to it, look after it. `app` is where it begins."""
