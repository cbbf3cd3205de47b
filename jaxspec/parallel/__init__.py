"""Placement of arrays on several devices, and jobs of several processes."""
