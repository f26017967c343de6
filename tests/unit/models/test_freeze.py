"""What stays frozen, by the names that the networks really have."""

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.models import freeze
from s3ac_jax.models.network import critic_network
from tests.helpers import tiny_spec


def test_attention_of_the_critic():
    names = set(named_leaves(critic_network(tiny_spec()).abstract))
    attention = {"q", "k", "v", "o", "q_bias", "k_bias", "v_bias"}
    frozen = {f"backbone/layers/attn/{name}" for name in attention}
    assert {name for name in names if freeze.frozen_in_critic(name)} == frozen
    assert names - frozen == {
        "value_head", "backbone/embed", "backbone/final_norm", "backbone/layers/attn_norm",
        "backbone/layers/mlp_norm", "backbone/layers/mlp/gate", "backbone/layers/mlp/up",
        "backbone/layers/mlp/down",
    }  # fmt: skip
    assert not any(freeze.router(name) for name in names)


def test_router():
    assert freeze.router("backbone/layers/moe/router")
    assert freeze.frozen_in_critic("backbone/layers/moe/router")
    assert not freeze.frozen_in_critic("backbone/layers/moe/router_norm")
