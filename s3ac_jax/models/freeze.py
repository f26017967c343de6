"""Which weights stay as they are: predicates on a weight's name."""


def attention(name: str) -> bool:
    """Projections and biases of attention; the norms before it are trained.

    Source: S3AC (2610.35518), stabilised critic, from SAO (2607.07508); extent is ours: inferred.
    """
    return "attn" in name.split("/")


def router(name: str) -> bool:
    """Routers of mixture-of-experts layers.

    Source: S3AC (2610.35518), stabilised critic.
    """
    return "router" in name.split("/")


def frozen_in_critic(name: str) -> bool:
    """What S3AC freezes in the critic: attention and routers.

    Source: S3AC (2610.35518), stabilised critic.
    """
    return attention(name) or router(name)
