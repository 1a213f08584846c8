"""Cost of ownership: what tokens take on a machine of one's own, with and without speculation."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Ownership:
    """What a million tokens take on a machine of one's own: hours, kilowatt-hours, money (in the prices' currency)."""

    hours: float
    energy: float
    money: float


def ownership(
    tokens_per_second: float, power: float, price_per_hour: float = 0.0, price_per_kwh: float = 0.0
) -> Ownership:
    """Cost of a million tokens at a measured speed.

    power: watts drawn while decoding. price_per_hour: of the machine (purchase over lifetime, room, upkeep), without
    electricity; price_per_kwh: of electricity. Speculation changes tokens_per_second and hardly the power, so both
    costs fall by its speed-up. Raises `ValueError` unless the speed is > 0 and the rest >= 0.
    """
    values = {"power": power, "price_per_hour": price_per_hour, "price_per_kwh": price_per_kwh}
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    if not 0 < tokens_per_second < math.inf:
        raise ValueError(f"tokens_per_second must be a finite number > 0, got {tokens_per_second!r}")
    hours = 1e6 / tokens_per_second / 3600
    energy = hours * power / 1000
    return Ownership(hours, energy, hours * price_per_hour + energy * price_per_kwh)
