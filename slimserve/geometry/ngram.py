"""The n-gram table: its rows follow from the config alone, its bytes a row from the checkpoint.

Source: vllm/models/qwen4_exp/nvidia/ngram_embedding.py; flash-next semantics, D.1.
"""

from __future__ import annotations

import functools

from slimserve.errors import Finding, RegistryError
from slimserve.geometry.layout import round_up
from slimserve.geometry.shape import Ngram

# Miller-Rabin with these bases is exact below 3.3e24 (Sorenson and Webster, 2015): more than 64 bits.
_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def head_sizes(ngram: Ngram, table: int = 0) -> tuple[int, ...]:
    """Rows of each hash head of the table with this number: primes from `base` on, no two alike across tables."""
    sizes: list[int] = []
    candidate = ngram.base
    while len(sizes) < (table + 1) * ngram.heads:
        if _is_prime(candidate):
            sizes.append(candidate)
        candidate += 1
    return tuple(sizes[table * ngram.heads :])


@functools.cache  # a plan asks for the same table again for each size that it tries
def rows(ngram: Ngram) -> int:
    """Rows of all tables, each padded as the engine pads it."""
    tables = range(len(ngram.layer_ids))
    return sum(round_up(sum(head_sizes(ngram, table)), ngram.divisor) for table in tables)


def row_bytes(ngram: Ngram, table_bytes: int) -> int:
    """Bytes of a row, scales of its blocks included.

    Args:
        ngram: the embedding.
        table_bytes: all tables in the checkpoint (`Checkpoint.host_bytes`).

    Raises:
        RegistryError: `table_bytes` is not a whole number of bytes a row.
    """
    if not ngram.layer_ids:
        return 0
    count = rows(ngram)
    if table_bytes <= 0 or table_bytes % count:
        raise RegistryError(
            Finding(
                f"host_bytes = {table_bytes} is not a multiple of the n-gram table's {count} rows",
                "the table follows from ngram_vocab_size_base, heads_per_ngram and ngram_size",
                "give rows x bytes a row, or correct those fields of the geometry",
            )
        )
    return table_bytes // count


def _is_prime(n: int) -> bool:
    if n < 2:
        return False
    for base in _BASES:
        if n % base == 0:
            return n == base
    twos = ((n - 1) & (1 - n)).bit_length() - 1
    odd = (n - 1) >> twos
    for base in _BASES:
        power = pow(base, odd, n)
        if power not in (1, n - 1) and all((power := power * power % n) != n - 1 for _ in range(twos - 1)):
            return False
    return True
