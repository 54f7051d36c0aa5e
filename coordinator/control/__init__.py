"""γ control: whether to speculate, how far ahead, and with which drafters."""
