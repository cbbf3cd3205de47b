"""Facts about platforms, accelerators and chips."""
