"""Which addresses other machines can listen in on."""

import ipaddress
import re
import urllib.parse

from s3ac_jax.rollout.backend import RolloutError


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Source: ours."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def stays_here(address: str) -> bool:
    """Whether what is sent to a gRPC target or an HTTP address stays on this machine.

    An address that is not understood does not. Source: gRPC's naming document (doc/naming.md).
    """
    if re.match(r"unix(-abstract)?:", address):
        return True
    place = re.sub(r"^(dns|ipv4|ipv6):(//[^/]*/)?|^https?://", "", address)
    try:
        host = urllib.parse.urlsplit(f"//{place}").hostname
    except ValueError:
        return False
    # A list of addresses, or one of a user, is more than a host.
    return host is not None and not set(",@/") & set(place) and is_loopback(host)


def check_token_hidden(address: str, token: str | None, encrypted: bool, fix: str) -> None:
    """Raises RolloutError when a token would travel in clear. fix: what to do about it.

    Source: ours.
    """
    if token and not encrypted and not stays_here(address):
        raise RolloutError(f"{address}: the token would travel there in clear: {fix}")
