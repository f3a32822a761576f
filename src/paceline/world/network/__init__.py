"""Sockets of this process to other ranks, and the small messages over them."""
