"""Training of drafts for a target model, and measurement of how many draft tokens the target accepts."""
