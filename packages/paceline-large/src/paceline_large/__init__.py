"""For what one device does not hold, or is too slow for: the axes tp, pp and cp, float8, models run from memory or disk."""
