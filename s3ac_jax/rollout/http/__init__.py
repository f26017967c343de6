"""OpenAI's HTTP API in front of the rollout server."""
