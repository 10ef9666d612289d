"""What an output directory says about itself, and what a run that was stopped leaves for the next."""
