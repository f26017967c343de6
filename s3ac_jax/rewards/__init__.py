"""Verifiers: from a response to its reward, on the host."""
