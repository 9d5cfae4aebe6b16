"""The gate: the engine serves only when it has become what was planned.

    plan --> checks.py       what each setting must be, with why it matters
             expected.py     the same as JSON for the engine's processes, and which processes those are
    engine --> observed.py   what it is, read from the engine's own objects, in each of its processes
               finite.py     whether its weights are numbers
    both --> verdict.py      a finding for each difference
             plugin.py       the entry point: sees to it that every process is looked at, and ends the one that differs
             words.py        the word of each process in the run folder, for which the supervisor waits

The engine changes settings in silence while it resolves them; docs/gate.md lists what is compared.
"""
