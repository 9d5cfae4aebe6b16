"""Kernels in three files each: reference, kernel, cases."""
