"""Tables of facts about platforms (CPU, GPU, TPU) and accelerators."""
