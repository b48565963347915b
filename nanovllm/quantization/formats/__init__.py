"""Contains one module per format of 8-bit or 4-bit weights."""
