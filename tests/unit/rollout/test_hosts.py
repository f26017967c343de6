"""Which addresses stay on this machine: in doubt, none."""

import pytest

from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.rollout.hosts import check_token_hidden, stays_here


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:9000", "127.8.8.8", "localhost:1", "[::1]:9000", "ipv4:127.0.0.1:9",
        "ipv6:[::1]:9", "dns:localhost:9", "dns:///localhost:9", "unix:/run/x", "unix-abstract:x",
        "http://127.0.0.1:8000", "http://localhost:8000",
    ],
)  # fmt: skip
def test_here(address):
    assert stays_here(address)
    check_token_hidden(address, "abc", False, "fix it")


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:9000", "0.0.0.0:9", "[::]:9", "example:9", "127.0.0.1.example:9", "", ":9",
        "dns:///127.0.0.1.example:9", "dns://127.0.0.1/example:9", "127.0.0.1@example:9",
        "ipv4:127.0.0.1:9,10.0.0.1:9", "xds:///localhost", "[127.0.0.1", "http://example:8000",
        "http://127.0.0.1@example:8000", "localhost.example:9", "vsock:1:2",
    ],
)  # fmt: skip
def test_elsewhere(address):
    assert not stays_here(address)
    with pytest.raises(RolloutError, match="in clear: fix it"):
        check_token_hidden(address, "abc", False, "fix it")
    check_token_hidden(address, "abc", True, "fix it")
    check_token_hidden(address, None, False, "fix it")
