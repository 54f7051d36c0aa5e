"""Modules that predict further tokens (MTP), with the experts and the attention of their targets."""
