"""Mixtures of experts: a layer that replaces a feed-forward layer, its configuration, and how its weights load."""
