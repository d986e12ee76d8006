"""The command `octavo bench`: drives a running server and says how it did.

A workload is drawn from a seed, driven at a server, and what came of each request is put down as
plain data; figures, table and plot are made from those data alone. Needs no torch and nothing of
`octavo`: whatever server speaks the client's tensors can be measured.
"""
