"""Trees of draft tokens: their shape, and their growth on the device."""
