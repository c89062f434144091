"""The steps of a round between the local work of clients and the server's step, one file for each stage.

`base.py` is the interface, `order.py` the chain of a run. A run without options has no stage.
"""
