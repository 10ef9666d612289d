"""What a model's Linears and experts see on a text, one decoder layer in memory at a time, and weights solved by it."""
