"""How models write calls of tools: a file each, and the table of them in `registry.py`."""
