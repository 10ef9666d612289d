"""Bring an output to the hub: what goes, the model card, and an upload that a cut connection leaves incomplete."""
