"""S3AC in JAX: stabilised, selective, scalable actor-critic RL for reasoning models."""
