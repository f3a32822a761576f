"""Runs that one command starts on other hosts: which hosts, what they run, and the conversation with each."""
