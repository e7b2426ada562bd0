"""Layers that models share, where they are the same."""
