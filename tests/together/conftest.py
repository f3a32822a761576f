"""What tests of several files need: a process that holds nothing of an earlier test, and one that serves a library's names."""

from served_names import fresh_states, serve  # noqa: F401  (fixtures)
