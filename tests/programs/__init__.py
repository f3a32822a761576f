"""Programs of other people, run as they are under the real library and under Paceline."""
