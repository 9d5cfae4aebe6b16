"""How a profile fills a machine, before anything is started: pure arithmetic over profile, model and platform.

    Subject --> layout.layout_of --> Layout     the profile's words as the geometry wants them
    Shape x Layout x step --> activations.activations --> Activations     what a step holds while it runs
    Subject x card --> rank.Rank --> Budget     memory of one rank, which adds up to the byte
    Rank x Budget --> capacity.capacity --> Capacity     blocks, slots, what of them can be cached
    Subject x Machine --> host.host_budget --> Budget     memory of the host, all ranks together
    Rank --> fitting.problems --> Problems     every way in which it does not fit, and the largest values that would

Bytes are whole numbers. The figures are those of the pinned engine, vllm 0.32.0.
"""

from __future__ import annotations
