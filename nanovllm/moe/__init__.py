"""Mixture-of-experts layers, which replace feed-forward layers: modules, configuration and weight loading."""
