"""Training and measuring of drafts."""
