"""For what one device does not hold, or is too slow for: axes tp, pp, cp and ep, float8, models run from memory or disk."""
