"""The whole run as one validated value: frozen dataclasses of every room."""
