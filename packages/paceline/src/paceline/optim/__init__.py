"""Optimizers, gradient scale, clipping, schedules."""
