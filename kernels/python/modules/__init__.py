"""The torch modules that a packed directory holds."""
