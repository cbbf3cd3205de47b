"""The paged KV cache: its pages, their layout on devices, their allocation, and their number that fits in memory."""
