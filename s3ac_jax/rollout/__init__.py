"""Making responses: a slot engine shaped like JetStream's, and the loop that feeds it."""
