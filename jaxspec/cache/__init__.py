"""The paged cache: pages, their layout, their allocation and their budget of memory."""
