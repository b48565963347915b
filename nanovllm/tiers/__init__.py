"""Tiers of the prefix cache outside the device, such as host memory."""
