"""Bounds of numbers, told with the names that they have in a config."""

import math


def at_least(section: str, config: object, **least: float) -> None:
    """Raises ValueError naming the first field below its least value. Source: ours."""
    for name, low in least.items():
        if not low <= getattr(config, name) < 2**31:
            raise ValueError(
                f"{section}.{name} must be at least {low} and below 2**31, got "
                f"{getattr(config, name)}"
            )


def positive(section: str, config: object, *names: str) -> None:
    """Raises ValueError naming the first field that isn't positive and finite. Source: ours."""
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(
                f"{section}.{name} must be positive and finite, got {getattr(config, name)}"
            )
