"""The connections between launchers of several nodes, and the store by which they can find each other."""
