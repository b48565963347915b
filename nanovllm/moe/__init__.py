"""Mixtures of experts: a layer in place of a feed-forward layer, its configuration, and how its weights are loaded."""
