"""The names under which blocks of transformers take a cache of keys and values."""

CACHES = ("past_key_value", "past_key_values", "layer_past")
