"""The weights of a model alone: read from files of every kind, and written as other libraries read them."""
