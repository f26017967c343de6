"""Actor and critic networks in flax NNX, their KV cache, and log-probs from hidden states."""
