"""Compiled device programs, their files on disk, and plans. A plan is one run of a program with its arguments."""
