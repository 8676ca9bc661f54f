"""Arithmetic of kernel launches on the host, in plain integers.

Triton's functions of these names serve kernels too and take 17 us a call on the host, as long as a
launch.
"""


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()
