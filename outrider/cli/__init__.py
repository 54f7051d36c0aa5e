"""The command line `outrider`: start services, send requests, check the machine. Its entry point is `main`."""

import importlib
import signal


def main() -> None:
    """Run `outrider`. Ctrl-C while its modules are imported ends it at once, without a traceback."""
    if (handler := signal.getsignal(signal.SIGINT)) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    app = importlib.import_module("outrider.cli.app")
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    app.main()
