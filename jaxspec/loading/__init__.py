"""Loading of models and drafts: finding checkpoints by name, reading, placing and converting their weights."""
