"""The packed directory: its files, what they say about themselves, and the modules in it."""
