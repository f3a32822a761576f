"""Who am I, which ranks are my peers, and how they talk."""
