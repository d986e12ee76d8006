"""The engine option that says which share of service each tenant has.

Knows nothing of who is served when, or of other options.
"""

from __future__ import annotations

from octavo.errors import ConfigError, shown

#: Bounds of a tenant's weight: counters stay exact to a thousandth of a token for years.
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0


def read_tenant_weights(text: str) -> dict[str, float]:
    """Read `gold=4,free=0.5`; `=2` gives the weight of requests that name no tenant.

    Raises:
        ConfigError: an item is no pair, names a tenant again, or has a weight out of bounds.
    """
    weights: dict[str, float] = {}
    for item in text.split(",") if text.strip() else ():
        name, is_pair, number = item.rpartition("=")
        if not is_pair:
            raise ConfigError(
                f"option tenant_weights has {shown(item)} but each item must be tenant=weight"
            )
        tenant = name.strip()
        if tenant in weights:
            raise ConfigError(f"option tenant_weights has tenant {shown(tenant)} twice")
        weights[tenant] = _read_weight(tenant, number)
    return weights


def _read_weight(tenant: str, number: str) -> float:
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:  # NaN fails every comparison
        raise ConfigError(
            f"option tenant_weights gives tenant {shown(tenant)} the weight "
            f"{shown(number.strip())} but it must be a number from {MIN_WEIGHT} to {MAX_WEIGHT:,g}"
        )
    return weight
