"""What makes a second forward equal the first: random draws and buffers."""
