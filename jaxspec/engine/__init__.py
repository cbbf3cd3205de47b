"""Scheduling of requests between launches of the device program."""
