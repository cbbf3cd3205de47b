"""Placement of arrays over devices, and jobs of several processes."""
