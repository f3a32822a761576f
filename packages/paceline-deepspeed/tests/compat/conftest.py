"""A process that serves a library's names."""

from served_names import serve  # noqa: F401  (fixture)
