"""The rollout server: JetStream's driver and gRPC server over our engine."""
