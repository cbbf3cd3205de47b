"""Loading of models and drafts: resolving names, reading weights, placing and converting them."""
