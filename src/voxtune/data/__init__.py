"""NIfTI files, the data contract of a model, placement on its grid, the simulated cohort, and CIFAR-10.

Arrays of files are (X, Y, Z); arrays of models are (D, H, W) = (Z, Y, X). Where both occur, the suffix of a name states
the order: `labels_DHW`, `image_XYZ`.
"""
