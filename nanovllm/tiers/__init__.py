"""Contains the tiers of the prefix cache that are outside the device, such as host memory."""
