"""Drafters: the methods that propose draft tokens. Each method has a file of its own."""
