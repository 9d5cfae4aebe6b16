"""Many nodes: one endpoint whose engine runs on several machines, each started by a command of its own.

    seat.py        which node this is, where the first one is, and what to type on each
    secret.py      what the nodes know and nobody else does
    wire.py        a link between two nodes: mutual proof, then signed lines of bounded size and a beat
    agreement.py   what must be the same on all nodes, and a line for each thing that is not
    arrivals.py    who comes to node 0's port: proves itself and claims a place, or is cut off
    head.py        node 0's side: who has come, whether all agree, when to start, who was lost
    orders.py      the other nodes' side: what node 0 wants
    headless.py    one start of an engine without an endpoint
    worker.py      the life of a node without an endpoint

docs/nodes.md is the operator's guide.
"""
