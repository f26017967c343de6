"""Prompt sets, tokenizers, demonstrations and packing: host-side arrays, no device work."""
