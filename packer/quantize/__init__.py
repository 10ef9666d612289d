"""Plan a conversion: what becomes of every tensor."""
