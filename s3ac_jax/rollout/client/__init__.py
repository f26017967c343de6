"""Rollouts by servers elsewhere, ours and others', behind the protocol of the trainer."""
