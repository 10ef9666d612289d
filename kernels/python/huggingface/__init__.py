"""What transformers knows of a model directory: its class, its names, its computed tables (extra `hf`)."""
