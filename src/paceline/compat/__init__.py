"""Thin translations of other libraries' names into ours."""
