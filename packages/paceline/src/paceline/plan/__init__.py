"""What will be done and why: pure, without a device or a group."""
