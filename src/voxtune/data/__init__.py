"""NIfTI in and out, the mask contract, the way to a model's grid and back, the embedded cohort, and CIFAR-10.

Arrays of files are (X, Y, Z); arrays for models are (D, H, W) = (Z, Y, X). A file's name ends in the order it holds
where both appear: `labels_DHW`, `image_XYZ`.
"""
