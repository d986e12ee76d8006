"""A soak: load near capacity for minutes, with cancels, wrong requests, killed engines and reloads.

    python -m benchmarks.soak --minutes 15

Started from the checkout's root. Every request must get exactly one final answer, nothing may leak,
and the throughput must come back. Prints a table; the exit status is 1 if a promise is broken.
"""
