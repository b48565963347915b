"""Contains one module per format of 8-bit or 4-bit weights (see `quantization/__init__.py`)."""
