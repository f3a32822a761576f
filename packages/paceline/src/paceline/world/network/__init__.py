"""The addresses, the store and the sockets by which ranks reach each other, and small messages over these sockets."""
