"""What serving engines need to run packed layers: one folder each, built on `tilewright.kernels` alone."""
