"""Trees of draft tokens: their topology (the parent of each token), and their growth on the device."""
