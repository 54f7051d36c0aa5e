"""γ control: how far ahead to draft."""
