"""The command line `outrider`."""
