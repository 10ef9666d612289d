"""Plan the packing of a checkpoint, and the way back."""
