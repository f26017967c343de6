"""Which weights stay as they are: predicates on a weight's name."""

from collections.abc import Callable

from s3ac_jax.models.lora import is_adapter


def attention(name: str) -> bool:
    """Projections and biases of attention, full or linear; the norms before it are trained.

    Source: S3AC (2610.35518), stabilised critic, from SAO (2607.07508); extent is ours: inferred.
    """
    return not {"attn", "linear_attn"}.isdisjoint(name.split("/"))


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


def all_but_adapters(frozen: Callable[[str], bool]) -> Callable[[str], bool]:
    """`frozen`, and of the rest everything that is neither an adapter nor the value head.

    Source: LoRA (2106.09685), section 4.1.
    """

    def held(name: str) -> bool:
        return frozen(name) or not (is_adapter(name) or name == "value_head")

    return held
