"""The kernels of fastsam: one specification (`reference`), several implementations (`native`, `triton_*`) that must
agree with it.

Every implementation is a module with the functions that `reference` defines, under the same names and signatures.
"""
