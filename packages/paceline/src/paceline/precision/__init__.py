"""The precision table and the loss scaler."""
