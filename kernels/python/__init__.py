"""Everything that a server needs at run time: formats, layouts, kernels, modules and the loader of packed files."""
