"""Tests of training in published formats."""
