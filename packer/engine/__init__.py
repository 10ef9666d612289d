"""Execute a plan: workers, memory, files, restart."""
