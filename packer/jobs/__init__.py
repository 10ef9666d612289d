"""The jobs that Tilewright does, each as a recipe: plan, calibrate, check, execute, measure. Commands call these."""
