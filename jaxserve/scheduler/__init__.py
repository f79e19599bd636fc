"""Plans steps, owns pages and slots, and fences its own writes."""
