"""`python -m verifier`: run the verifier service."""

from __future__ import annotations

from outrider.base.config import check_installed, main
from outrider.settings.verifier import VerifierSettings


def run(settings: VerifierSettings) -> None:
    check_installed("torch", "models")
    from verifier import startup  # here: it loads torch, and wrong flags are told before

    startup.run(settings)


if __name__ == "__main__":
    main(VerifierSettings, run, "verifier")
