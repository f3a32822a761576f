"""Expert parallelism: the experts of a Mixture of Experts, divided over ranks."""
