"""Public tools with which users test their own loops."""
