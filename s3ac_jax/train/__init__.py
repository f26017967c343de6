"""The loop and its steps, value pretraining, SFT, evaluation, hooks and studies."""
