"""The engine for CUDA devices: a model spec in torch, its common steps captured as graphs."""
